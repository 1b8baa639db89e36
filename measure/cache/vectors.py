"""Vectors of compiled modules from numpy arrays, and arrays over vectors."""

from typing import Any

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64


def integers(array: Any) -> vec[i64]:
    """Return an array's whole numbers; unsigned 64-bit numbers become signed ones of the same bits."""
    array = np.ascontiguousarray(array)
    return vec[i64](
        memoryview(array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False))
    )


def floats(array: Any) -> vec[float]:
    """Return an array's numbers."""
    contiguous: Any = np.ascontiguousarray(array, np.float64)
    return vec[float](memoryview(contiguous))


def array_of(numbers: Any, kind: type[Any]) -> npt.NDArray[Any]:
    """Return the numbers of a vec as an array over the same memory, which may not be written."""
    return np.frombuffer(numbers, kind) if len(numbers) else np.empty(0, kind)
