"""Array types of all packages; ``Any`` at run time, so that annotations do not import numpy."""

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
