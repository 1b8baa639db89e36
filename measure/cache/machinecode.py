"""Machine code of functions, kept on disk where there is a folder for it."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Compiled = TypeVar("Compiled", bound=Callable[..., object])


def kept(function: Compiled, **options: Any) -> Compiled:
    """Compile ``function`` when Python first calls it; later processes read the machine code.

    A user who can write neither the package's folder nor ``~/.cache``, as in a container, compiles in each process.
    """
    compiled = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # numba's word for no such folder
        compiled.enable_caching()
    return cast(Compiled, compiled)
