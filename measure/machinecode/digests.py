"""Digest of all that a compiled function is made from: its code, that of each kernel that it calls, and constants."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from measure.machinecode.kernels import LateCode

_OWN = frozenset({"engines", "measure", "scripts", "sim", "tests", "tracefile"})
"""Packages whose modules kernels may name; numpy and numba stand in the same folder where kvtape is installed."""
_PLAIN = (int, float, str, bytes, bool, type(None), type(Ellipsis), np.generic, np.dtype, np.ufunc)


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


_OWN_SOURCES = _sources()
"""Of the code that this process runs: files may change beside it."""


def sources_changed() -> bool:
    """Return whether this folder has other code than this process began with: what is imported late does not fit."""
    return _sources() != _OWN_SOURCES


def digest_of(function: Callable[..., object]) -> bytes:
    """Return the digest of a function and of this folder, which compiles it.

    Names are looked up as the function would: a variant that calls other kernels has another digest.
    """
    whole = hashlib.sha256(_OWN_SOURCES)
    for part in _Reached().parts(function):
        whole.update(part.encode())
    return whole.digest()


class _Reached:
    """Objects on the way from a function; each counts once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        """So that no other object gets the address of one."""

    def parts(self, one: Any) -> Iterator[str]:
        if isinstance(one, _PLAIN):
            yield f"{type(one).__name__} {one!r};"
        elif isinstance(one, type | BuiltinFunctionType):
            members = {name: each.value for name, each in getattr(one, "__members__", {}).items()}
            yield f"{one.__module__}.{one.__qualname__} {getattr(one, '_fields', ())} {members};"
        elif isinstance(one, frozenset):
            yield f"{sorted(map(repr, one))};"
        elif isinstance(one, tuple | list):
            yield f"{type(one).__name__} {getattr(one, '_fields', len(one))};"
            for each in one:
                yield from self.parts(each)
        elif (number := self._numbers.get(id(one))) is not None:
            yield f"again {number};"
        else:
            self._numbers[id(one)] = len(self._numbers)
            self._kept.append(one)
            yield from self._parts_of_object(one)

    def _parts_of_object(self, one: Any) -> Iterator[str]:
        yield f"{type(one).__name__};"
        if isinstance(one, LateCode):
            yield from self.parts(one.function)
        elif isinstance(one, FunctionType):
            yield from self._parts_of_code(one.__code__, one.__globals__)
            yield from self.parts(one.__defaults__)
            yield from self.parts(tuple(cell.cell_contents for cell in one.__closure__ or ()))
        elif isinstance(one, np.ndarray):
            yield f"{one.dtype} {one.shape} {one.tobytes().hex()};"
        else:
            raise TypeError(f"{one!r}: a constant of machine code; expected a number, a tuple, an array or a function")

    def _parts_of_code(self, code: CodeType, names: dict[str, Any]) -> Iterator[str]:
        yield f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_flags};"
        yield f"{code.co_names} {code.co_varnames} {code.co_freevars};"
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._parts_of_code(constant, names)
            else:
                yield from self.parts(constant)
        for name in code.co_names:
            if name in names:
                yield from self._parts_of_name(names[name], code.co_names)

    def _parts_of_name(self, found: Any, names: tuple[str, ...]) -> Iterator[str]:
        """Yield parts of a global; of a module of ours, all that the code may mean; of another, numbers alone."""
        if not isinstance(found, ModuleType):
            yield from self.parts(found)
            return
        yield f"{found.__name__};"
        is_own = found.__name__.partition(".")[0] in _OWN
        for name in names:
            if hasattr(found, name) and (is_own or isinstance(getattr(found, name), _PLAIN)):
                yield from self.parts(getattr(found, name))
