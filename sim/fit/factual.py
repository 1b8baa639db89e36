"""Hits as the engine reported them, for fits from a trace that reports cached tokens.

A capture may begin with a warm cache, and a prediction of the hits has errors of its own; neither should change the
step times. Room never runs out here, so a fit from captures with preemptions should simulate the hits instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from sim.vllm.config import EngineConfig
from sim.vllm.pool import BlockPool
from sim.workload.arrivals import Arrival, Arrivals
from tracefile.records.arrays import IntArray

_LONG_BEFORE_MS = 1e8


class FactualPool(BlockPool):
    """Block pool in which each request hits a given number of blocks; the first key of its chain, unique, names it."""

    __slots__ = ("_hits",)

    def __init__(self, num_gpu_blocks: int, block_size: int, hits: dict[int, int]) -> None:
        super().__init__(num_gpu_blocks, block_size, enable_prefix_caching=False)
        self._hits = hits

    def lookup(self, keys: Sequence[int], most: int) -> list[int]:
        """Idle blocks, as many as the request with ``keys`` hit."""
        hits = min(self._hits.get(keys[0], 0), most) if keys else 0
        blocks: list[int] = []
        block = self._next_free[0]
        while len(blocks) < hits and block != 0:
            blocks.append(block)
            block = self._next_free[block]
        return blocks


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
    blocks = sum(len(arrival.hashes) + 2 for arrival in own)
    return own, FactualPool(blocks + 1, block_size, hits)


def with_factual_hits(
    arrivals: Arrivals, config: EngineConfig, cached_tokens: IntArray
) -> tuple[Arrivals, EngineConfig]:
    """Return a workload in which each of ``arrivals`` hits its ``cached_tokens``, and an engine that never evicts.

    Earlier requests, long before the capture, leave those blocks in the cache; they come first in the workload.
    """
    size = config.block_size
    hits = np.minimum(cached_tokens // size, arrivals.full_blocks)
    own = replace(arrivals, known=hits, hashes=np.arange(1, hits.sum() + 1, dtype=np.uint64))
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
