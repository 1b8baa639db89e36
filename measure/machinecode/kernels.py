"""Functions in Python whose machine code is made when it is first called, and only then.

numba costs a third of a second and 100 MB. A module of kernels is imported without it; machine code on disk is called
without it.
"""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


class LateCode:
    """A function in Python, for others to call once they are compiled."""

    def __init__(self, function: Callable[..., object]) -> None:
        update_wrapper(cast(Any, self), function)
        self.function = function

    @cached_property
    def compiled(self) -> Any:
        """numba's dispatcher of the function, or its intrinsic; entries compile one at a time."""
        return self._make()

    @property
    def _numba_type_(self) -> Any:
        """Type that numba asks for when a kernel calls this one."""
        return self.compiled._numba_type_

    def _make(self) -> Any:
        from measure.machinecode import linking  # noqa: PLC0415 - numba

        return linking.dispatcher(self.function, linking.KernelCompiler)


class Intrinsic(LateCode):
    """Code that numba generates in the place of a call."""

    @property
    def _numba_type_(self) -> Any:
        from numba.core.typing.templates import builtin_registry  # noqa: PLC0415 - see LateCode

        compiled = self.compiled
        return next(kind for one, kind in reversed(builtin_registry.globals) if one is compiled)

    def _make(self) -> Any:
        from numba.extending import intrinsic  # noqa: PLC0415 - see LateCode

        return intrinsic(self.function)


def kernel(function: Kernel) -> Kernel:
    """Compile ``function`` into the code that calls it; Python may not.

    Kernels make no arrays and keep none, so they do without numba's runtime (``_nrt``): counting the holders of each
    array at every call took more than half of a run.
    """
    return cast(Kernel, LateCode(function))


def late_intrinsic(define: Callable[..., object]) -> Any:
    """Return ``define`` as numba's intrinsic, for kernels to call."""
    return Intrinsic(define)


@late_intrinsic
def stay_apart(_: object) -> tuple[object, object]:
    """Keep the calling kernel one function instead of a copy in each caller; kernels with many callers then compile in
    seconds instead of minutes."""
    from numba.core import types  # noqa: PLC0415 - see LateCode

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate
