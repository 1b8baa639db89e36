"""How kernels are compiled: exactly (no reordering of floating point), and once for each installation.

Only what is called from outside is kept on disk; it contains what it calls. The cache notices a change of the file that
the called kernel is in, not of the others, so a digest of them all goes into the layout's types, which the cache's key
contains (``sim.kernels.layout.SOURCES``).

Kernels make no arrays and keep none, so they do without numba's runtime (``_nrt``): counting at every call who holds
each array took more than half of a run.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.extending import intrinsic

Kernel = TypeVar("Kernel", bound=Callable[..., object])
SPARED = {"numba.np.arraymath": "scipy.linalg.cython_blas", "numba.core.typing.cffi_utils": "cffi"}
"""Parts of numba, and what each loads if it can, for functions that kernels do not call."""


def kernel(function: Kernel) -> Kernel:
    """Compile ``function`` into the kernels that call it; no other code may."""
    return cast(Kernel, numba.njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


@intrinsic  # type: ignore[untyped-decorator]
def stay_apart(_: object) -> tuple[object, object]:
    """Called in a kernel's body: there is one of it, which others call, instead of a copy in each of them. Compiling
    then takes seconds instead of minutes where much is called from many places."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def entry(function: Kernel) -> Kernel:
    """Compile ``function`` when Python first calls it; later processes read the machine code from the cache. It runs
    without Python's lock, so that threads run on cores of their own."""
    _spare_imports()
    return cast(Kernel, numba.njit(_nrt=False, cache=True, nogil=True)(function))


def _spare_imports() -> None:
    """Load parts of numba without what they make no use of here: half of the time that loading a kernel takes."""
    for part, unused in SPARED.items():
        if part not in sys.modules and unused not in sys.modules:
            sys.modules[unused] = cast(ModuleType, None)  # how Python is told that there is no such module
            try:
                importlib.import_module(part)
            finally:
                del sys.modules[unused]
