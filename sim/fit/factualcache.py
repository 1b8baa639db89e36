"""A KV cache in which each request hits as many blocks as its capture reports. mypyc compiles this module."""

from typing import Final

from mypy_extensions import i64

from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.onerequest import Request
from sim.vllm.segments import BlockTable, SegmentPool

UNLIMITED: Final = 1 << 62


class FactualCache(SingleGroupCache):
    """A KV cache that never evicts. Each request hits ``hit_limit`` blocks of its chain, whose keys are known: those
    that are cached, which other requests may hold, and blocks that nobody holds in place of the others."""

    def __init__(self, block_size: i64) -> None:
        super().__init__(SegmentPool(UNLIMITED), block_size)

    def look_up(self, request: Request) -> i64:
        most = min((request.num_tokens - 1) // self.block_size, request.hit_limit)
        if self.pool.lookup(request, most) < most:
            self._add_blocks(request, most)
        self.hits = self.pool.lookup(request, most)
        return self.hits * self.block_size

    def _add_blocks(self, request: Request, blocks: i64) -> None:
        """Cache the leading blocks of the request's chain, without a holder."""
        table = BlockTable(request.keys, first_key=request.first_key, known_keys=request.known_keys)
        held = self.pool.hold(table, blocks)
        self.pool.take(blocks - held)
        table.num_blocks = blocks
        self.pool.publish(table, held, blocks)
        self.pool.release(table)
