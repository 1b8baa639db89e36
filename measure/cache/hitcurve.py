"""Prefix hits at every cache size, in one pass.

The policy is the stack algorithm nearest to vLLM's pool: LRU over full blocks. Hits of a request are counted at its
arrival: leading blocks of its prompt, short of its last token (rule 6). Then its blocks are touched leaf to root,
so that tails go first: those of its output, as far as their hashes are known, before those of its prompt. Blocks
pinned by running requests and time are left out.

**The bound.** An engine that admits requests in order of arrival has, at an admission, computed nothing but blocks of
earlier arrivals. So it never hits more than the unlimited cache. At a finite size LRU by arrival is no bound: a long
request's blocks are freed at its end, and may outlive those of a request that arrived later and was short.

LRU keeps, at every size S, the S blocks touched last (Mattson et al., 1970). So a block's depth in that order at its
request's arrival says from which size on it hits. One histogram of depths is the whole curve. A leading
block hits only if those before it do: what counts is the running maximum of the depths.
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
    """Hits at every cache size from one block to where no more memory helps. Arrays of one length."""

    sizes: IntArray
    """Cache sizes in blocks: 1, 2, 3 …"""
    hit_blocks: IntArray
    """Prompt blocks hit at each size; never falls."""
    bound_blocks: IntArray
    """Blocks that no engine of each size can exceed: of every request its unlimited hits, at most the size."""
    block_size: int
    lookup_blocks: int
    """Full prompt blocks of the whole trace."""
    input_tokens: int
    fine_block_size: int
    """The trace's, which ``block_size`` is a multiple of."""
    requests: int
    whole_chains: int
    """Requests whose filled blocks are all known. With fewer than all, an engine may hit more than the maximum."""

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
        """Smallest cache, in blocks, with this share of the max hits."""
        return self.size_for(-int(-self.max_hit_blocks * share // 1))

    def rate_at(self, size: int) -> float:
        return self.hits_at(size) * self.block_size / self.input_tokens if self.input_tokens else 0.0


def hit_curve(accesses: Accesses) -> HitCurve:
    """Return the hits of an LRU of every size."""
    stack = LruStack(int(accesses.starts[-1]), accesses.numbers)
    depths = repeated_byte(b"\0", accesses.distinct + 1)
    requests_by_hits = repeated_byte(b"\0", int(accesses.limits.max(initial=0)) + 1)
    for piece in accesses.pieces():
        limits = accesses.limits[piece.first : piece.first + len(piece.starts) - 1]
        boxed = integers(piece.blocks), integers(piece.starts), integers(limits)
        stack.count_depths(boxed, (depths, requests_by_hits))
    # From the last depth that occurs on, nothing changes any more.
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
        accesses.whole_chains,
    )


def _bound(requests_by_hits: IntArray, sizes: int) -> IntArray:
    """Σ min(hits, size) over requests, at each size from 1 on: so many blocks hold no more of one prompt."""
    with_as_many = np.zeros(sizes, np.int64)
    found = np.cumsum(requests_by_hits[::-1])[::-1][1 : sizes + 1]
    with_as_many[: len(found)] = found
    return np.cumsum(with_as_many)
