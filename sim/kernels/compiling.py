"""Compilation of kernels: exact (no reordering of floating point), and once for each installation.

Only entries, called from Python, are kept on disk, with all that they call. The cache notices a change of the entry's
own file only, so a digest of all sources is part of the layout's types, which the cache's key contains
(``sim.kernels.layout.SOURCES``).

Kernels make no arrays and keep none, so they do without numba's runtime (``_nrt``): counting the holders of each array
at every call took more than half of a run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

from measure.cache.machinecode import LateCode, compile_and_keep, compiled

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def kernel(function: Kernel) -> Kernel:
    """Compile ``function`` into the kernels that call it; no other code may."""

    def make(plain: Any) -> Any:
        from sim.kernels import linking  # noqa: PLC0415 - see LateCode

        options = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return linking.once_for_literals(compiled(plain, pipeline_class=linking.KernelCompiler, **options))

    return cast(Kernel, LateCode(function, make))


class _Intrinsic(LateCode):
    """Code that numba generates in the place of a call."""

    @property
    def _numba_type_(self) -> Any:
        from numba.core.typing.templates import builtin_registry  # noqa: PLC0415 - see LateCode

        compiled = self.compiled
        return next(kind for one, kind in reversed(builtin_registry.globals) if one is compiled)


def late_intrinsic(define: Callable[..., object]) -> Any:
    """Return ``define`` as numba's intrinsic, for kernels to call."""

    def make(function: Any) -> Any:
        from numba.extending import intrinsic  # noqa: PLC0415 - see LateCode

        return intrinsic(function)

    return _Intrinsic(define, make)


@late_intrinsic
def stay_apart(_: object) -> tuple[object, object]:
    """Keep the calling kernel one function instead of a copy in each caller; kernels with many callers then compile in
    seconds instead of minutes."""
    from numba.core import types  # noqa: PLC0415 - see LateCode

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def entry(function: Kernel) -> Kernel:
    """Compile ``function`` when Python first calls it; later processes read the machine code from the cache. It runs
    without Python's lock, so that threads run on cores of their own."""

    def make(plain: Any) -> Any:
        from sim.kernels.linking import EntryCompiler  # noqa: PLC0415 - see LateCode

        made = compile_and_keep(plain, pipeline_class=EntryCompiler, _nrt=False, nogil=True, no_cfunc_wrapper=True)
        _forget_unreadable(made)
        return made

    return cast(Kernel, LateCode(function, make))


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
        if not isinstance(one, LateCode) or isinstance(one, _Intrinsic):
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


def _forget_unreadable(compiled: Any) -> None:
    """Delete an index of machine code that names classes of an earlier version: numba fails on it at the first call."""
    if compiled.stats.cache_path is None:
        return
    cache = compiled._cache._cache_file
    try:
        cache._load_index()
    except (AttributeError, ImportError):
        Path(cache._index_path).unlink(missing_ok=True)
