"""KV cache interface of the scheduler (vLLM's ``KVCacheManager``), and the KV cache of a single KV group.

mypyc compiles this module.
"""

from typing import Final

from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.vllm.request import Request
from sim.vllm.segments import BlockTable, SegmentPool
from tracefile.records.errors import InputError

UNLIMITED: Final = 1 << 62
"""Blocks of a pool that never evicts."""
DOES_NOT_FIT: Final = -1


class KVCache:
    """Prefix hits and block allocation of requests. Counts are of tokens; names with ``blocks`` count blocks."""

    def fits(self, request: Request) -> bool:
        """Return whether the KV cache has enough blocks for the request alone."""
        raise NotImplementedError

    def look_up(self, request: Request) -> i64:
        """Return the request's longest prefix hit, in tokens (vLLM's ``get_computed_blocks``); ``admit`` uses it."""
        raise NotImplementedError

    def count_hits(self, keys: BoxedVec) -> i64:
        """Count the leading cached blocks of a chain of block keys."""
        raise NotImplementedError

    def admit(self, request: Request, hit_tokens: i64, tokens: i64) -> bool:
        """Allocate the prefix hit just looked up, and blocks for ``tokens`` more (vLLM's ``allocate_slots``). False,
        and no change, unless the complete prompt has free blocks."""
        raise NotImplementedError

    def extend(self, request: Request, end: i64) -> bool:
        """Allocate blocks for tokens up to ``end`` (``allocate_slots``). False, and no change: too few free blocks."""
        raise NotImplementedError

    def cache_blocks(self, request: Request, end: i64) -> bool:
        """Add the full blocks up to token ``end`` to the prefix cache. True: another request may hit a new block, or
        ``extend`` freed a block."""
        raise NotImplementedError

    def free(self, request: Request) -> None:
        """Free the request's blocks."""
        raise NotImplementedError

    def serve_alone(self, request: Request) -> i64:
        """Look up, compute and free a request that runs alone; return its prefix hit in tokens, or DOES_NOT_FIT.
        Raises InputError if block hashes are not chained."""
        if not self.fits(request):
            return DOES_NOT_FIT
        self.begin_step()
        hit_tokens = self.look_up(request)
        is_computed = self.compute(request, hit_tokens)
        self.free(request)
        if not self.is_chained():
            raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
        return hit_tokens if is_computed else DOES_NOT_FIT

    def compute(self, request: Request, hit_tokens: i64) -> bool:
        """Compute a request that runs alone, from its prefix hit to its end; False: too few free blocks."""
        end = request.last_token - 1
        is_admitted = self.admit(request, hit_tokens, end - hit_tokens)
        if is_admitted:
            self.cache_blocks(request, end)
        return is_admitted

    def clip(self, request: Request, start: i64, tokens: i64) -> i64:
        """Return the size of the prefill chunk at ``start``, at most ``tokens``."""
        return tokens

    def begin_step(self) -> None:
        """Begin a scheduler step."""

    def end_step(self) -> bool:
        """End the composition of a scheduler step. True: the next step may admit a waiting request."""
        return False

    def repeated_tokens(self) -> i64:
        """Count KV cache tokens that running requests share: references to a block beyond the first."""
        raise NotImplementedError

    def evicted_blocks(self) -> i64:
        """Return the number of evicted blocks so far."""
        raise NotImplementedError

    def usage(self) -> float:
        """Return the share of the KV cache blocks in use (vLLM's ``kv_cache_usage``)."""
        raise NotImplementedError

    def reset(self) -> bool:
        """Empty the prefix cache (vLLM's ``reset_prefix_cache``); False, and no change, while a block is held."""
        raise NotImplementedError

    def is_chained(self) -> bool:
        """Return False once a block key occurred at two depths: prefix hits are not reliable from there on."""
        return True


class SingleGroupCache(KVCache):
    """KV cache of a single KV group of full attention, with blocks of ``block_size`` tokens."""

    def __init__(self, pool: SegmentPool, block_size: i64) -> None:
        self.pool: SegmentPool = pool
        self.block_size: i64 = block_size
        self.hits: i64 = 0
        """Blocks of the last prefix hit."""

    def blocks_for(self, tokens: i64) -> i64:
        """Return the number of blocks that hold ``tokens``."""
        return (tokens + self.block_size - 1) // self.block_size

    def fits(self, request: Request) -> bool:
        return self.blocks_for(request.last_token - 1) <= self.pool.num_blocks

    def look_up(self, request: Request) -> i64:
        """Rule 6: prefix hit of full blocks; the last token is always computed."""
        most = min((request.num_tokens - 1) // self.block_size, request.hit_limit)
        self.hits = self.pool.lookup(request, most)
        return self.hits * self.block_size

    def count_hits(self, keys: BoxedVec) -> i64:
        return self.pool.lookup(BlockTable(keys, num_keys=len(keys)), len(keys))

    def admit(self, request: Request, hit_tokens: i64, tokens: i64) -> bool:
        """Rule 9: the complete prompt needs free blocks. A request loaded from host memory already holds its blocks."""
        new_blocks = self.blocks_for(request.num_tokens) - request.num_blocks
        if request.num_blocks == 0:
            new_blocks += self.pool.idle_hits - self.hits  # rule 8: idle hits leave the free queue, too
        if new_blocks > self.pool.num_free:
            return False
        if request.num_blocks == 0:
            self.adopt(request, self.hits)
        return self.extend(request, hit_tokens + tokens)

    def adopt(self, request: Request, hits: i64) -> None:
        """Give the request the blocks of the prefix hit just looked up; only keys that are not chained differ now."""
        pool = self.pool
        num_free = pool.num_free
        num_hits = pool.touch(request, hits)
        if num_hits < hits or num_free - pool.num_free != pool.idle_hits:
            pool.not_chained = True
        request.num_blocks = hits
        request.num_computed = hits * self.block_size
        request.allocated_tokens = request.num_computed
        self.count_hashed(request, hits)

    def extend(self, request: Request, end: i64) -> bool:
        new_blocks = self.blocks_for(end) - request.num_blocks
        if new_blocks > 0:
            if new_blocks > self.pool.num_free:
                return False
            self.allocate(request, new_blocks)
        return True

    def allocate(self, request: Request, blocks: i64) -> None:
        """Allocate free blocks to the request."""
        self.pool.allocate(blocks)
        request.num_blocks += blocks
        request.allocated_tokens += blocks * self.block_size

    def cache_blocks(self, request: Request, end: i64) -> bool:
        """Rule 10: full blocks can be hit from here on, also within the same scheduler step."""
        full = end // self.block_size
        is_shared = request.num_hashed < request.num_keys  # no other request can hit private blocks
        self.pool.cache_full_blocks(request, request.num_hashed, full)
        self.count_hashed(request, full)
        return is_shared

    def free(self, request: Request) -> None:
        self.pool.free_blocks(request)
        request.num_blocks = 0
        request.allocated_tokens = 0
        self.count_hashed(request, 0)

    def count_hashed(self, request: Request, blocks: i64) -> None:
        """Record the number of leading blocks of the request that are in the prefix cache."""
        request.num_hashed = blocks
        request.next_full = (blocks + 1) * self.block_size

    def repeated_tokens(self) -> i64:
        return self.pool.num_repeated * self.block_size

    def evicted_blocks(self) -> i64:
        return self.pool.evicted_blocks

    def usage(self) -> float:
        return 1.0 - float(self.pool.num_free) / float(self.pool.num_blocks)

    def reset(self) -> bool:
        return self.pool.reset()

    def is_chained(self) -> bool:
        return not self.pool.not_chained


def single_group_cache(block_size: i64, usable_blocks: i64 | None) -> SingleGroupCache:
    """Return an empty KV cache of ``usable_blocks``; None: a cache that never evicts."""
    return SingleGroupCache(SegmentPool(UNLIMITED if usable_blocks is None else usable_blocks + 1), block_size)


class FactualCache(SingleGroupCache):
    """KV cache that never evicts and reproduces recorded hits: each request hits ``hit_limit`` blocks of its chain. A
    block that is not cached is added to the prefix cache as an idle block first."""

    def __init__(self, block_size: i64) -> None:
        super().__init__(SegmentPool(UNLIMITED), block_size)

    def look_up(self, request: Request) -> i64:
        most = min((request.num_tokens - 1) // self.block_size, request.hit_limit)
        self.hits = self.pool.lookup(request, most)
        if self.hits < most:
            self._add_blocks(request, most)
            self.hits = self.pool.lookup(request, most)
        return self.hits * self.block_size

    def _add_blocks(self, request: Request, blocks: i64) -> None:
        """Add the leading blocks of the request's chain to the prefix cache, as idle blocks."""
        table = BlockTable(request.keys, first_key=request.first_key, num_keys=request.num_keys)
        num_hits = self.pool.touch(table, blocks)
        self.pool.allocate(blocks - num_hits)
        table.num_blocks = blocks
        self.pool.cache_full_blocks(table, num_hits, blocks)
        self.pool.free_blocks(table)
