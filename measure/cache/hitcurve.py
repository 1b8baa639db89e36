"""Prefix hits at every cache size, in one pass.

The eviction policy is LRU over full blocks, the stack algorithm nearest to vLLM's block pool. The prefix hit of a
request is counted at its arrival: leading prompt blocks without the block of the last token (rule 6). Then its blocks
are touched from leaf to root, so that leaves are evicted first: hashed output blocks before prompt blocks. Time and
blocks pinned by running requests are ignored.

**The bound.** An engine that admits requests in order of arrival has computed only blocks of earlier arrivals at an
admission. So it never hits more than the unlimited cache. At a finite size LRU by arrival is no bound: the blocks of a
long request are freed at its end, and may outlive blocks of a short request that arrived later.

LRU of every size S holds the S blocks touched last (Mattson et al., 1970). So the depth of a block in LRU order at the
arrival is the smallest cache size with a hit, and a histogram of depths is the complete curve. A leading block hits
only if all blocks before it hit: the running maximum of the depths counts.
"""

from dataclasses import dataclass

import numpy as np

from measure.cache.accesses import Accesses
from measure.cache.hashtable import repeated_byte
from measure.cache.stackdepth import LruStack
from measure.cache.vectors import array_of, integers
from tracefile.records.arrays import IntArray


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Prefix hits at every cache size, from one block to the size with all hits. Arrays of equal length."""

    sizes: IntArray
    """Cache sizes in blocks: 1, 2, 3 …"""
    hit_blocks: IntArray
    """Prompt blocks hit at each size; non-decreasing."""
    bound_blocks: IntArray
    """Upper bound of the hits at each size: unlimited hits of each request, at most the size."""
    block_size: int
    lookup_blocks: int
    """Full prompt blocks of the trace."""
    input_tokens: int
    fine_block_size: int
    """Block size of the trace; ``block_size`` is a multiple."""
    requests: int
    complete_chains: int
    """Requests with hashes for all full blocks. If fewer than ``requests``, an engine may hit more than the curve."""

    @property
    def hit_tokens(self) -> IntArray:
        return self.hit_blocks * self.block_size

    @property
    def max_hit_blocks(self) -> int:
        return int(self.hit_blocks[-1]) if len(self.hit_blocks) else 0

    def hits_at(self, size: int) -> int:
        if size < 1 or not len(self.sizes):
            return 0
        return int(self.hit_blocks[min(size, len(self.sizes)) - 1])

    def size_for(self, hits: int) -> int:
        return int(self.sizes[np.searchsorted(self.hit_blocks, hits)])

    def size_for_share(self, share: float) -> int:
        """Return the smallest cache size, in blocks, with this share of the maximum hits."""
        return self.size_for(-int(-self.max_hit_blocks * share // 1))

    def rate_at(self, size: int) -> float:
        return self.hits_at(size) * self.block_size / self.input_tokens if self.input_tokens else 0.0


def hit_curve(accesses: Accesses) -> HitCurve:
    """Return the prefix hits of an LRU cache of every size."""
    stack = LruStack(int(accesses.starts[-1]), accesses.numbers)
    depths = repeated_byte(b"\0", accesses.distinct + 1)
    requests_by_hits = repeated_byte(b"\0", int(accesses.limits.max(initial=0)) + 1)
    for piece in accesses.pieces():
        limits = accesses.limits[piece.first : piece.first + len(piece.starts) - 1]
        boxed = integers(piece.blocks), integers(piece.starts), integers(limits)
        stack.count_depths(boxed, (depths, requests_by_hits))
    # Beyond the largest depth the hits are constant.
    counts = array_of(depths, np.int64)
    hit_blocks = np.cumsum(counts[: int(np.flatnonzero(counts).max(initial=0)) + 1])[1:]
    return HitCurve(
        np.arange(1, len(hit_blocks) + 1, dtype=np.int64),
        hit_blocks,
        _bound(array_of(requests_by_hits, np.int64), len(hit_blocks)),
        accesses.block_size,
        int(accesses.lookup_blocks.sum()),
        accesses.input_tokens,
        accesses.fine_block_size or accesses.block_size,
        len(accesses.limits),
        accesses.complete_chains,
    )


def _bound(requests_by_hits: IntArray, sizes: int) -> IntArray:
    """Return Σ min(hits, size) over requests, by size: a cache holds at most ``size`` blocks of a prefix."""
    requests_with_hits = np.zeros(sizes, np.int64)
    at_least = np.cumsum(requests_by_hits[::-1])[::-1][1 : sizes + 1]
    requests_with_hits[: len(at_least)] = at_least
    return np.cumsum(requests_with_hits)
