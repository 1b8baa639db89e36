"""Numbers as JSON, digit by digit: most of a predicted trace is gaps."""

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import Places
from tracefile.records.arrays import FloatArray

Bytes = npt.NDArray[np.uint8]

MOST_DIGITS = 22
"""Most bytes of one gap, its comma included."""
_ZERO, _POINT, _COMMA, _OPEN, _CLOSE = (np.uint8(ord(letter)) for letter in "0.,[]")


@entry
def write_arrays(values: FloatArray, firsts: Places, counts: Places, into: Bytes, ends: Places) -> None:
    """Write JSON arrays of ``values`` of 0 and more to four decimals: array i has ``counts[i]`` from ``firsts[i]`` on.

    ``ends``: end of each array in ``into``. Digits are those of the shortest equal number, as always in JSON.
    """
    end = 0
    for number in range(len(firsts)):
        into[end] = _OPEN
        end += 1
        for place in range(firsts[number], firsts[number] + counts[number]):
            if place > firsts[number]:
                into[end] = _COMMA
                end += 1
            end = _write(into, end, int(np.rint(values[place] * 10_000.0)))
        into[end] = _CLOSE
        end += 1
        ends[number] = end


@kernel
def _write(into: Bytes, end: int, parts: int) -> int:
    """Write ``parts`` ten-thousandths."""
    whole = parts // 10_000
    rest = parts - whole * 10_000
    digits, left = 1, whole // 10
    while left > 0:
        digits += 1
        left //= 10
    for place in range(end + digits - 1, end - 1, -1):
        tenth = whole // 10
        into[place] = _ZERO + np.uint8(whole - 10 * tenth)
        whole = tenth
    end += digits
    into[end] = _POINT
    end += 1
    scale = 1_000
    while True:
        digit = rest // scale
        into[end] = _ZERO + np.uint8(digit)
        end += 1
        rest -= digit * scale
        if rest == 0:
            return end
        scale //= 10
