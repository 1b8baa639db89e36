"""Machine code of functions, kept on disk where there is a folder for it."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

Compiled = TypeVar("Compiled", bound=Callable[..., object])


SPARED = {"numba.np.arraymath": "scipy.linalg.cython_blas", "numba.core.typing.cffi_utils": "cffi"}
"""Parts of numba, and the import that each makes only for functions that kernels do not call."""


def kept(function: Compiled, **options: Any) -> Compiled:
    """Compile ``function`` when Python first calls it; later processes read the machine code.

    A user who can write neither the package's folder nor ``~/.cache``, as in a container, compiles in each process.
    """
    _spare_imports()
    compiled = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # numba's word for no such folder
        compiled.enable_caching()
    return cast(Compiled, compiled)


def _spare_imports() -> None:
    """Load parts of numba without the imports that they make no use of here: half of the time of loading a kernel."""
    for part, unused in SPARED.items():
        if part not in sys.modules and unused not in sys.modules:
            sys.modules[unused] = cast(ModuleType, None)  # how Python is told that there is no such module
            try:
                importlib.import_module(part)
            finally:
                del sys.modules[unused]
