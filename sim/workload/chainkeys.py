"""What a workload's chains are known to hold, as one array for the compiled pool."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sim.workload.chain import is_private
from tracefile.records.arrays import IntArray

Keys = npt.NDArray[np.uint64]


def known_keys(chains: Sequence[Sequence[int]]) -> tuple[Keys, IntArray]:
    """The true hashes of each chain, which come before its private keys, chain after chain; how many each has.

    Raises OverflowError where one is no unsigned 64-bit number.
    """
    values = array("Q")
    ends: list[int] = []
    for chain in chains:
        try:
            values.extend(chain)
        except OverflowError:  # those before it are in
            known = len(values) - (ends[-1] if ends else 0)
            if not is_private(chain[known]):
                raise
        ends.append(len(values))
    return np.frombuffer(values, np.uint64) if values else np.empty(0, np.uint64), np.diff(ends, prepend=0)


def numbered(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """Chains of any numbers with each hash replaced by the same small one; private keys stay."""
    seen: dict[int, int] = {}
    return [[key if is_private(key) else seen.setdefault(key, len(seen)) for key in chain] for chain in chains]
