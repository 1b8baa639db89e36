"""Block hashes as dense numbers, so that the cache is an array: a hash table with open addressing."""

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry
from sim.kernels.layout import Ints
from tracefile.hashing.splitmix64 import GOLDEN

_GOLDEN = np.uint64(GOLDEN)
_ONE = np.uint64(1)


@entry
def number_hashes(hashes: npt.NDArray[np.uint64], slots: Ints, bits: int, numbers: Ints) -> int:
    """Write to ``numbers`` 0, 1, 2 … in the order in which the ``hashes`` first occur; how many there are.

    ``slots``: 2**``bits`` zeros, more than there are hashes.
    """
    mask, shift, distinct = np.uint64(len(slots) - 1), np.uint64(64 - bits), 0
    for position in range(len(hashes)):
        slot = (hashes[position] * _GOLDEN) >> shift
        while slots[slot] != 0 and hashes[slots[slot] - 1] != hashes[position]:
            slot = (slot + _ONE) & mask
        if slots[slot] == 0:
            slots[slot] = position + 1
            numbers[position] = distinct
            distinct += 1
        else:
            numbers[position] = numbers[slots[slot] - 1]
    return distinct
