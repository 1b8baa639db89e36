"""Variants of compiled functions, which call other kernels in the places of some."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, cast

from measure.machinecode.entries import entry
from measure.machinecode.kernels import Intrinsic, Kernel, LateCode, kernel


def variant(
    compiled: Kernel, replaced: Mapping[Any, Any], module: str = "", make: Callable[[Any], Any] = kernel
) -> Kernel:
    """Return a kernel's Python source, which calls other functions, directly or not, in the places of some.

    Functions of ``module``, which has the others, call those that they are in the places of. ``make``: of the source of
    each kernel that it calls.
    """
    scopes: dict[str, dict[str, Any]] = {}
    made: dict[int, Any] = {}

    def source_of(one: Any) -> FunctionType:
        names = one.function.__globals__
        if (name := names["__name__"]) not in scopes:
            scopes[name] = scope = dict(names)
            scope |= {key: made_of(value, name) for key, value in names.items() if isinstance(value, LateCode)}
        return FunctionType(one.function.__code__, scopes[name])

    def made_of(one: Any, caller: str) -> Any:
        one = one if caller == module else replaced.get(one, one)
        if not isinstance(one, LateCode) or isinstance(one, Intrinsic):
            return one
        source = source_of(one)  # which may make it on the way
        return made[id(one)] if id(one) in made else made.setdefault(id(one), make(source))

    return cast(Kernel, source_of(compiled))


def entry_variant(name: str, compiled: Kernel, replaced: Mapping[Any, Any], module: str = "") -> Kernel:
    """Return a ``variant`` of an entry as an entry of its own; ``name``: of its machine code on disk."""
    source: Any = variant(compiled, replaced, module)
    source.__name__ = source.__qualname__ = name
    return entry(cast(Kernel, source))


@kernel
def nothing(*_: Any) -> int:
    """Stand in a variant for a kernel that is not needed."""
    return 0
