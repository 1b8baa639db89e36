"""SplitMix64 in Python and numpy: random number n of a stream is ``mix64(key + (n + 1) * GOLDEN)``."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # numpy would cost every importing process 30 MB
    from tracefile.records.arrays import UInt64Array

GOLDEN: Final = 0x9E3779B97F4A7C15
MASK64: Final = (1 << 64) - 1
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Return the SplitMix64 finalizer of a value: a bijection in which every input bit affects every output bit."""
    value = value & MASK64
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK64
    return value ^ (value >> 31)


def mix64_array(values: "UInt64Array") -> "UInt64Array":
    """Apply ``mix64`` to each value, in place; return the same array."""
    import numpy as np  # noqa: PLC0415 - as above

    shifted = values >> 30
    values ^= shifted
    values *= _MIX_1
    np.right_shift(values, 27, out=shifted)
    values ^= shifted
    values *= _MIX_2
    np.right_shift(values, 31, out=shifted)
    values ^= shifted
    return values
