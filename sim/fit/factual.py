"""A pool in which every request hits exactly what the engine said it hit, for fits from a trace that says so.

A capture may begin with a warm cache, and a prediction of the hits has errors of its own; neither should bend the
step times. Blocks are taken and given back as in any pool, but they are not shared: room never runs out here, so a
fit from captures with preemptions should simulate the hits instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from sim.vllm.pool import BlockPool
from sim.workload.workload import Arrival


class FactualPool(BlockPool):
    """Tells requests apart by the first key of their chains, which must be unique."""

    __slots__ = ("_hits",)

    def __init__(self, num_gpu_blocks: int, block_size: int, hits: dict[int, int]) -> None:
        super().__init__(num_gpu_blocks, block_size, enable_prefix_caching=False)
        self._hits = hits

    def lookup(self, keys: Sequence[int], most: int) -> list[int]:
        """As many idle blocks as the request with ``keys`` hit in fact."""
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
    """``arrivals`` under keys of their own, and the pool that gives each its ``cached_tokens``."""
    keys = count(1)
    own = [replace(arrival, hashes=[next(keys) for _ in arrival.hashes]) for arrival in arrivals]
    hits = {
        arrival.hashes[0]: tokens // block_size
        for arrival, tokens in zip(own, cached_tokens, strict=True)
        if arrival.hashes
    }
    blocks = sum(len(arrival.hashes) + 2 for arrival in own)
    return own, FactualPool(blocks + 1, block_size, hits)
