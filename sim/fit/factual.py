"""Hits as the engine reported them, for fits from a trace that reports cached tokens.

A capture may begin with a warm cache, and a prediction of the hits has errors of its own; neither should change the
step times. Room never runs out here, so a fit from captures with preemptions should simulate the hits instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from sim.vllm.config import EngineConfig
from sim.vllm.pool import BlockPool
from sim.workload.chain import FIRST_PRIVATE
from sim.workload.workload import Arrival
from tracefile.records.schema import Record, RequestId

_LONG_BEFORE_MS = 1e12


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
    arrivals: Sequence[Arrival], config: EngineConfig, cached_tokens: Sequence[int]
) -> tuple[list[Arrival], EngineConfig]:
    """Return a workload in which each of ``arrivals`` hits its ``cached_tokens``, and an engine that never evicts.

    One request per hit runs long before the capture and leaves those blocks in the cache; these come first.
    """
    begun_ms = min((arrival.arrival_ms for arrival in arrivals), default=0.0) - _LONG_BEFORE_MS
    keys, size = count(1), config.block_size
    earlier, own, blocks = [], [], 1
    for arrival, tokens in zip(arrivals, cached_tokens, strict=True):
        chain = [next(keys) for _ in range(min(tokens // size, len(arrival.hashes)))]
        if chain:
            warm = Record(request_id=RequestId("earlier"))
            earlier.append(Arrival(warm, "runs", len(chain) * size, 1, chain, begun_ms))
        own.append(replace(arrival, hashes=chain + [FIRST_PRIVATE] * (len(arrival.hashes) - len(chain))))
        blocks += len(chain) + len(arrival.hashes) + 4
    longest = min(config.longest_request, config.usable_blocks * size + 1)
    roomy = replace(config, num_gpu_blocks=max(blocks, 2), max_model_len=longest, enable_prefix_caching=True)
    return [*earlier, *own], roomy
