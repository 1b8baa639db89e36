"""Blocks by hand in the format of accesses."""

import numpy as np

from measure.cache.interning import PackedChains, pack_chains
from tracefile.records.arrays import IntArray


def in_order(blocks: list[int], starts: IntArray) -> tuple[PackedChains, IntArray, IntArray, IntArray]:
    """Requests with dense block numbers, all known, in the order of their chains."""
    hashed = np.diff(starts)
    return pack_chains(np.array(blocks, np.int32), hashed), np.arange(len(hashed)), hashed, starts.astype(np.int64)
