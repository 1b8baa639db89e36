"""Where a chain's key is looked for in a hash table, and how far two chains agree."""

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import kernel
from tracefile.hashing.splitmix64 import GOLDEN

LOOKS = 7
_GOLDEN = np.uint64(GOLDEN)


@kernel
def first_slot(key: np.uint64, slots: int) -> np.int64:
    """The slot at which the search for ``key`` begins, of a power of two."""
    mixed = key * _GOLDEN
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(slots - 1))


@kernel
def end_of_match(keys: npt.NDArray[np.uint64], one: int, other: int, start: int, end: int) -> int:
    """How far two chains that agree at ``start`` agree, at most to ``end``: equal keys have equal ones before them.

    Key number d of the chains is ``keys[one + d]`` and ``keys[other + d]``.
    """
    if keys[one + end - 1] == keys[other + end - 1]:
        return end
    # Several looks at once: each is far away in memory, and none has to wait for another.
    same, differs = start, end - 1
    while differs - same > 1:
        step = (differs - same + LOOKS) // (LOOKS + 1)
        agree = 0
        for look in range(1, LOOKS + 1):
            place = min(same + look * step, differs)
            agree += keys[one + place] == keys[other + place]
        differs = min(same + (agree + 1) * step, differs)
        same += agree * step
    return same + 1
