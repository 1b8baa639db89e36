"""Entries: compiled functions that Python calls, kept on disk with all kernels that they call."""

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import RLock, Timer
from typing import Any, Final, TypeVar, cast

from measure.machinecode import files
from measure.machinecode.arguments import NO_WORDS, add_argument
from measure.machinecode.digests import digest_of, sources_changed
from measure.machinecode.kernels import LateCode
from tracefile.records.errors import InputError
from tracefile.records.extras import is_lacking, load_extra

Function = TypeVar("Function", bound=Callable[..., object])
_ONE_AT_A_TIME = RLock()
_TOLD: Final[list[bool]] = []
"""Not empty: this process has told that it compiles."""
TOLD_AFTER_S = 1.0
"""A compilation that takes less is not told."""


class Entry(LateCode):
    """A compiled function; kernels may call it, too."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._codes: dict[tuple[Any, ...], Callable[[list[int]], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        kinds: list[Any] = []
        words = list(NO_WORDS)
        for one in arguments:
            add_argument(one, kinds, words)
        key = tuple(kinds)
        return (self._codes.get(key) or self._load(key))(words)

    def _load(self, kinds: tuple[Any, ...]) -> Callable[[list[int]], Any]:
        with _ONE_AT_A_TIME:
            if kinds not in self._codes:
                if is_lacking("numba"):
                    load_extra("numba")  # which raises InputError
                if sources_changed():
                    raise InputError("the installed code has changed since this process began; expected a new process")
                from measure.machinecode import loading  # noqa: PLC0415 - LLVM

                self._codes[kinds] = loading.load(self._read_or_make(kinds, loading.machine()))
            return self._codes[kinds]

    def _read_or_make(self, kinds: tuple[Any, ...], machine: bytes) -> files.MachineCode:
        function: Any = self.function
        distinct = machine + described(kinds)
        place = files.place_of(Path(function.__code__.co_filename), function.__qualname__, distinct)
        digest = sha256(digest_of(function) + distinct).digest()
        if made := files.find(place, digest):
            return made
        folder = place.writable_folder()
        if folder is None:
            return self._compile(kinds, None)
        path = folder / place.name
        with files.alone(path):
            if made := files.read(path, digest, place):  # another process made it meanwhile
                return made
            made = self._compile(kinds, folder)
            files.write(path, digest, made)
        return made

    def _compile(self, kinds: tuple[Any, ...], folder: Path | None) -> files.MachineCode:
        from measure.machinecode import linking  # noqa: PLC0415 - numba

        telling = Timer(TOLD_AFTER_S, tell, [folder])
        telling.daemon = True
        telling.start()
        try:
            return linking.compile_entry(self, kinds)
        finally:
            telling.cancel()
            telling.join()


def entry(function: Function) -> Function:
    """Compile ``function`` when Python first calls it; later processes read the machine code from disk.

    It runs without Python's lock, so that threads run on cores of their own.
    """
    return cast(Function, Entry(function))


def described(kinds: Any) -> bytes:
    """Return kinds of arguments as text that is the same in each process."""
    return repr([_described(kind) for kind in kinds]).encode()


def _described(kind: Any) -> Any:
    if isinstance(kind, type):
        return kind.__name__
    if not isinstance(kind, tuple):
        return kind.str
    if isinstance(kind[0], type):
        names = getattr(kind[0], "_fields", ())
        return f"{kind[0].__module__}.{kind[0].__qualname__}", names, [_described(one) for one in kind[1]]
    dtype, dimensions, flags = kind
    return dtype.descr, dimensions, flags


def tell(folder: Path | None) -> None:
    """Tell on stderr, once in a process, that it compiles, to keep in ``folder`` if there is one."""
    if _TOLD:
        return
    _TOLD.append(True)
    if folder is None:
        often = "in each run (up to 20 s); expected a folder to keep it in, as NUMBA_CACHE_DIR names one"
    else:
        often = "for the first run of this kind (up to 20 s) …"
    print(f"kvtape: compiling machine code {often}", file=sys.stderr)
