"""Cached tokens as a capture reports them, as the blocks that each of its requests hits (``sim.fit.factualcache``)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrival, Arrivals
from tracefile.records.arrays import IntArray


def with_factual_hits(arrivals: Arrivals, block_size: int, cached_tokens: IntArray) -> tuple[Arrivals, IntArray]:
    """Return ``arrivals`` and the blocks that each hits; they have keys of their own if a hit has a key unknown."""
    hits = np.minimum(cached_tokens // block_size, arrivals.full_blocks)
    if not (hits > arrivals.known).any():
        return arrivals, hits
    return replace(arrivals, known=hits, hashes=np.arange(1, hits.sum() + 1, dtype=np.uint64)), hits


def factual_arrivals(arrivals: Sequence[Arrival], columns: Arrivals, hits: IntArray) -> list[Arrival]:
    """Return ``arrivals`` with the keys of ``columns`` and their hits."""
    ends = np.cumsum(columns.known).tolist()
    keys = columns.hashes.tolist()
    return [
        replace(arrival, hashes=keys[end - known : end], hit_limit=most)
        for arrival, end, known, most in zip(arrivals, ends, columns.known.tolist(), hits.tolist(), strict=True)
    ]


def without_eviction(config: EngineConfig) -> EngineConfig:
    """Return an engine of unlimited blocks that takes the requests that ``config`` takes."""
    longest = min(config.longest_request, config.usable_blocks * config.block_size + 1)
    return replace(config, max_model_len=longest, enable_prefix_caching=True)
