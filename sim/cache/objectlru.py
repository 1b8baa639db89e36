"""A plain LRU of single blocks, compiled: a yardstick beside the pool, for traces in memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.kernels.objectlru import LRU, RECENCY, ObjectLru, touch_paths
from sim.kernels.tree import NOT_CHAINED, SPAN, Tree, grow_tree, trace_paths
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Paths:
    """Chains as lists of spans, which are never touched in part."""

    lengths: IntArray
    """Blocks of each span."""
    starts: IntArray
    """Where each chain's list begins in ``spans``; one more at the end."""
    spans: npt.NDArray[np.int32]


def find_paths(keys: Keys, starts: IntArray) -> Paths:
    """Cut chains, number r in ``keys`` from ``starts[r]`` on, at every branch and end.

    Raises InputError where it notices that they are no chains: a key must have the same ones before it wherever it
    occurs.
    """
    chains = len(starts) - 1
    slots = 1 << (4 * chains + 1).bit_length()
    tree = Tree(np.empty(2 * chains, SPAN), np.zeros(slots, np.int32))
    count = grow_tree(tree, keys, starts)
    if count == NOT_CHAINED:
        raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
    path_starts = np.empty(chains + 1, np.int64)
    spans = np.empty(16 * chains, np.int32)
    size = trace_paths(tree, keys, starts, path_starts, spans)
    if size > len(spans):
        spans = np.empty(size, np.int32)
        trace_paths(tree, keys, starts, path_starts, spans)
    return Paths(tree.spans["end"][:count] - tree.spans["start"][:count], path_starts, spans[:size])


def object_hits(paths: Paths, capacity: int) -> tuple[IntArray, int]:
    """Hit blocks of each chain in a cache of ``capacity`` blocks, and how many were evicted."""
    recency, lru = np.zeros(len(paths.lengths) + 1, RECENCY), np.zeros(1, LRU)
    recency["length"][1:] = paths.lengths
    lru["capacity"] = capacity
    hits = np.empty(len(paths.starts) - 1, np.int64)
    touch_paths(ObjectLru(recency, lru), paths.starts, paths.spans, hits)
    return hits, int(lru["evicted_blocks"][0])
