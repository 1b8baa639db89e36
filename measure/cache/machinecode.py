"""Machine code of functions, made when they are first called, and kept on disk where there is a folder for it."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from functools import cache, cached_property, partial, update_wrapper
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar, cast

from tracefile.records.extras import load_extra

Compiled = TypeVar("Compiled", bound=Callable[..., object])


SPARED = {"numba.np.arraymath": "scipy.linalg.cython_blas", "numba.core.typing.cffi_utils": "cffi"}
"""Parts of numba, and the import that each makes only for functions that kernels do not call."""
COMPILING = "numba:compile"
"""numba's event: a function that is called has no machine code yet, in this process or on disk."""
_ONE_AT_A_TIME = RLock()


class LateCode:
    """A function in Python, and its machine code once Python or another kernel has called it.

    numba costs a third of a second and 100 MB: a module of kernels is imported without it.
    """

    def __init__(self, function: Callable[..., object], make: Callable[[Any], Any]) -> None:
        update_wrapper(self, function)
        self.function = function
        self._make = make

    @cached_property
    def compiled(self) -> Any:
        """numba's dispatcher of the function, or its intrinsic."""
        with _ONE_AT_A_TIME:
            return self.__dict__.get("compiled") or self.__dict__.setdefault("compiled", self._make(self.function))

    @property
    def _numba_type_(self) -> Any:
        """Type that numba asks for when another kernel calls this one."""
        return self.compiled._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)


def late(function: Compiled, **options: Any) -> Compiled:
    """Compile ``function`` when Python or a kernel first calls it."""
    return cast(Compiled, LateCode(function, partial(compiled, **options)))


def kept(function: Compiled, **options: Any) -> Compiled:
    """Compile ``function`` when it is first called; later processes read the machine code.

    A user who can write neither the package's folder nor ``~/.cache``, as in a container, compiles in each process.
    """
    return cast(Compiled, LateCode(function, partial(compile_and_keep, **options)))


def compiled(function: Any, **options: Any) -> Any:
    """Return numba's dispatcher of ``function``, which compiles it for each of its arguments' types."""
    numba = load_extra("numba")
    _spare_imports()
    _tell_of_compiling()
    return numba.njit(**options)(function)


@cache
def _tell_of_compiling() -> None:
    """Have a process tell on stderr of the first function that it compiles, and read from no disk."""
    from numba.core import event  # noqa: PLC0415 - see LateCode

    class Notice(event.Listener):  # type: ignore[misc]
        said = False

        def on_start(self, event: Any) -> None:
            if not self.said:
                self.said = True
                print(notice(event.data["dispatcher"].stats.cache_path), file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            """Say nothing more."""

    event.register(COMPILING, Notice())


def notice(folder: str | None) -> str:
    """Return words about machine code that is being made, to be kept in ``folder`` if there is one."""
    if folder is None:
        often = "in each run (up to 20 s); expected a folder to keep it in, as NUMBA_CACHE_DIR names one"
    else:
        often = "once for this installation (up to 20 s) …"
    return f"kvtape: compiling machine code, {often}"


def compile_and_keep(function: Any, **options: Any) -> Any:
    """Return numba's dispatcher of ``function``, whose machine code is kept."""
    made = compiled(function, **options)
    with contextlib.suppress(RuntimeError):  # numba's word for no such folder
        made.enable_caching()
    return made


def _spare_imports() -> None:
    """Load parts of numba without the imports that they make no use of here: half of the time of loading a kernel."""
    for part, unused in SPARED.items():
        if part not in sys.modules and unused not in sys.modules:
            sys.modules[unused] = cast(ModuleType, None)  # how Python is told that there is no such module
            try:
                importlib.import_module(part)
            finally:
                del sys.modules[unused]
