"""Cached tokens as a capture reports them, imposed on the plain scheduler's pool and on the compiled engine."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from measure.cache.chains import chain_places
from sim.vllm.config import EngineConfig
from sim.vllm.pool import BlockPool
from sim.workload.arrivals import Arrival, Arrivals
from tracefile.records.arrays import IntArray, UInt64Array

_LONG_BEFORE_MS = 1e8


class FactualPool(BlockPool):
    """Block pool in which each request hits a given number of blocks; the first key of its chain, unique, names it.

    A block that another request holds at the time is hit where contents agree, any other idle one else.
    """

    __slots__ = ("_block_of", "_content", "_content_of", "_found", "_hits")

    def __init__(self, num_gpu_blocks: int, block_size: int, hits: dict[int, int], content: dict[int, int]) -> None:
        super().__init__(num_gpu_blocks, block_size, enable_prefix_caching=False)
        self._hits = hits
        self._content = content
        """By a request's own key: that of the block's content."""
        self._block_of: dict[int, int] = {}
        """By content: a held block."""
        self._content_of: dict[int, int] = {}
        """The same, by block."""
        self._found: dict[int, int] = {}

    def lookup(self, keys: Sequence[int], most: int) -> list[int]:
        """Blocks, held ones where contents agree, as many as the request with ``keys`` hit."""
        hits = min(self._hits.get(keys[0], 0), most) if keys else 0
        self._found = {}
        block = self._next_free[0]
        for key in keys[:hits]:
            held = self._block_of.get(self._content[key])
            if held is None and block == 0:
                break
            self._found[block if held is None else held] = self._content[key]
            block = self._next_free[block] if held is None else block
        return list(self._found)

    def hold(self, blocks: Iterable[int]) -> None:
        super().hold(blocks)
        for block in blocks:
            self._note(block, self._found[block])

    def insert(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self._note(block, self._content[key])

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        for block in blocks:
            if self._references[block] == 0 and block in self._content_of:
                del self._block_of[self._content_of.pop(block)]

    def _note(self, block: int, content: int) -> None:
        if self._block_of.setdefault(content, block) == block:
            self._content_of[block] = content


def factual_pool(
    arrivals: Sequence[Arrival], block_size: int, cached_tokens: Sequence[int]
) -> tuple[list[Arrival], FactualPool]:
    """Return ``arrivals`` under keys of their own, and the pool that gives each its ``cached_tokens``."""
    keys = count(1)
    own = [replace(arrival, hashes=[next(keys) for _ in arrival.hashes]) for arrival in arrivals]
    hits = {
        arrival.hashes[0]: tokens // block_size
        for arrival, tokens in zip(own, cached_tokens, strict=True)
        if arrival.hashes
    }
    content = dict(enumerate((key for arrival in arrivals for key in arrival.hashes), 1))
    blocks = sum(len(arrival.hashes) + 2 for arrival in own)
    return own, FactualPool(blocks + 1, block_size, hits, content)


def with_factual_hits(
    arrivals: Arrivals, config: EngineConfig, cached_tokens: IntArray
) -> tuple[Arrivals, EngineConfig]:
    """Return ``arrivals`` after earlier requests that leave their ``cached_tokens``, and an engine without eviction."""
    size = config.block_size
    hits = np.minimum(cached_tokens // size, arrivals.full_blocks)
    own = replace(arrivals, known=hits, hashes=_keys_of_hits(arrivals, hits))
    warm = own.take(np.flatnonzero(hits))
    earlier = replace(
        warm,
        arrival_ms=np.full(len(warm), arrivals.arrival_ms.min(initial=0.0) - _LONG_BEFORE_MS),
        prompt_tokens=warm.known * size,
        output_tokens=np.ones(len(warm), np.int64),
        abort_after_ms=np.full(len(warm), np.nan),
        full_blocks=warm.known,
    )
    both = earlier.followed_by(own)
    longest = min(config.longest_request, config.usable_blocks * size + 1)
    blocks = int((both.full_blocks + 3).sum()) + 2
    roomy = replace(config, num_gpu_blocks=blocks, max_model_len=longest, enable_prefix_caching=True)
    return replace(both, numbers=np.arange(len(both))), roomy


def _keys_of_hits(arrivals: Arrivals, hits: IntArray) -> UInt64Array:
    """Recorded keys of the blocks hit, so that requests share them; keys of their own where any is unknown."""
    if (hits > arrivals.known).any():
        return np.arange(1, hits.sum() + 1, dtype=np.uint64)
    return arrivals.hashes[chain_places(np.cumsum(arrivals.known) - arrivals.known, hits)]
