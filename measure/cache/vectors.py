"""Conversion between numpy arrays and the vectors of compiled modules."""

from typing import Any

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64


def integers(array: Any) -> vec[i64]:
    """Return an integer array as a vec; unsigned 64-bit numbers, such as block hashes, keep their bits."""
    array = np.ascontiguousarray(array)
    return vec[i64](
        memoryview(array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False))
    )


def floats(array: Any) -> vec[float]:
    """Return a float array as a vec."""
    contiguous: Any = np.ascontiguousarray(array, np.float64)
    return vec[float](memoryview(contiguous))


def array_of(numbers: Any, kind: type[Any]) -> npt.NDArray[Any]:
    """Return a read-only array over the memory of a vec."""
    return np.frombuffer(numbers, kind) if len(numbers) else np.empty(0, kind)
