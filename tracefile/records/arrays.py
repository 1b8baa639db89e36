"""Names of the array types that all rooms use; at run time they stand for any type, so that a name needs no numpy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]
    Int32Array = npt.NDArray[np.int32]
    IntArray = npt.NDArray[np.int64]
    UInt64Array = npt.NDArray[np.uint64]
else:
    BoolArray = FloatArray = Int32Array = IntArray = UInt64Array = Any
