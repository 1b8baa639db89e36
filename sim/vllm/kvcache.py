"""KV cache of an engine as its scheduler asks for it (vLLM's ``KVCacheManager``), and that of one KV group.

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
NO_ROOM: Final = -1


class KVCache:
    """Prefix hits and blocks of requests. Counts of tokens, of blocks where that is said."""

    def fits(self, request: Request) -> bool:
        """Return whether the request, alone, has blocks for all of its tokens."""
        raise NotImplementedError

    def look_up(self, request: Request) -> i64:
        """Return the tokens of the request's longest prefix hit; ``admit`` takes this hit."""
        raise NotImplementedError

    def count_hits(self, keys: BoxedVec) -> i64:
        """Count the leading blocks of a chain that are cached."""
        raise NotImplementedError

    def admit(self, request: Request, hit_tokens: i64, tokens: i64) -> bool:
        """Give the request the hit just looked up, and blocks for ``tokens`` more, if its whole prompt has blocks."""
        raise NotImplementedError

    def extend(self, request: Request, end: i64) -> bool:
        """Give the request blocks for its tokens up to ``end``; False, and nothing taken, if they are not free."""
        raise NotImplementedError

    def publish(self, request: Request, end: i64) -> bool:
        """Cache the blocks that the request's tokens up to ``end`` fill; True if another request may hit a new one, or
        if ``extend`` freed a block."""
        raise NotImplementedError

    def release(self, request: Request) -> None:
        """Free the request's blocks."""
        raise NotImplementedError

    def serve_alone(self, request: Request) -> i64:
        """Look a request up, compute it to its end and release it, with no other at once. Return its hit tokens,
        NO_ROOM: it does not fit. Raises InputError if hashes are not chained."""
        if not self.fits(request):
            return NO_ROOM
        self.begin_step()
        hit_tokens = self.look_up(request)
        is_computed = self.compute(request, hit_tokens)
        self.release(request)
        if not self.is_chained():
            raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
        return hit_tokens if is_computed else NO_ROOM

    def compute(self, request: Request, hit_tokens: i64) -> bool:
        """Compute a request that is alone from its hit to its end; False: it finds no block."""
        end = request.last_token - 1
        is_admitted = self.admit(request, hit_tokens, end - hit_tokens)
        if is_admitted:
            self.publish(request, end)
        return is_admitted

    def clip(self, request: Request, start: i64, tokens: i64) -> i64:
        """Return as many of ``tokens`` from ``start`` as one prefill chunk may have."""
        return tokens

    def begin_step(self) -> None:
        """Note that the scheduler composes a new step."""

    def end_step(self) -> bool:
        """Note that the step is composed; True if this alone may let a waiting request into the next one."""
        return False

    def repeated_tokens(self) -> i64:
        """Count the tokens of blocks that running requests hold and another request held before."""
        raise NotImplementedError

    def evicted_blocks(self) -> i64:
        """Count the blocks evicted so far."""
        raise NotImplementedError

    def usage(self) -> float:
        """Return the share of the blocks that are held."""
        raise NotImplementedError

    def reset(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while a request holds a block."""
        raise NotImplementedError

    def is_chained(self) -> bool:
        """Return False once a key was met at two depths: hits are not reliable from there on."""
        return True


class SingleGroupCache(KVCache):
    """KV cache of full attention: one KV group, blocks of ``block_size`` tokens."""

    def __init__(self, pool: SegmentPool, block_size: i64) -> None:
        self.pool: SegmentPool = pool
        self.block_size: i64 = block_size
        self.hits: i64 = 0
        """Blocks of the last hit looked up."""

    def blocks_for(self, tokens: i64) -> i64:
        """Return the blocks that so many tokens take."""
        return (tokens + self.block_size - 1) // self.block_size

    def fits(self, request: Request) -> bool:
        return self.blocks_for(request.last_token - 1) <= self.pool.num_blocks

    def look_up(self, request: Request) -> i64:
        """Rule 6: the last token is always computed."""
        most = min((request.num_tokens - 1) // self.block_size, request.hit_limit)
        self.hits = self.pool.lookup(request, most)
        return self.hits * self.block_size

    def count_hits(self, keys: BoxedVec) -> i64:
        return self.pool.lookup(BlockTable(keys, known_keys=len(keys)), len(keys))

    def admit(self, request: Request, hit_tokens: i64, tokens: i64) -> bool:
        """Rule 9. A request whose blocks came from memory behind the pool has them already."""
        lacking = self.blocks_for(request.num_tokens) - request.num_blocks
        if request.num_blocks == 0:
            lacking += self.pool.idle_hits - self.hits  # rule 8: idle hits leave the free queue, too
        if lacking > self.pool.num_free:
            return False
        if request.num_blocks == 0:
            self.adopt(request, self.hits)
        return self.extend(request, hit_tokens + tokens)

    def adopt(self, request: Request, hits: i64) -> None:
        """Give the request its hit, just looked up; chained keys are held as they were looked up."""
        pool = self.pool
        num_free = pool.num_free
        held = pool.hold(request, hits)
        if held < hits or num_free - pool.num_free != pool.idle_hits:
            pool.not_chained = True
        request.num_blocks = hits
        request.num_computed = hits * self.block_size
        request.room_tokens = request.num_computed
        self.count_hashed(request, hits)

    def extend(self, request: Request, end: i64) -> bool:
        lacking = self.blocks_for(end) - request.num_blocks
        if lacking > 0:
            if lacking > self.pool.num_free:
                return False
            self.take(request, lacking)
        return True

    def take(self, request: Request, blocks: i64) -> None:
        """Give the request so many blocks, which are free."""
        self.pool.take(blocks)
        request.num_blocks += blocks
        request.room_tokens += blocks * self.block_size

    def publish(self, request: Request, end: i64) -> bool:
        """Rule 10: blocks full of known tokens can be hit from here on, within the same step too."""
        full = end // self.block_size
        was_known = request.num_hashed < request.known_keys  # no other request can hit private blocks
        self.pool.publish(request, request.num_hashed, full)
        self.count_hashed(request, full)
        return was_known

    def release(self, request: Request) -> None:
        self.pool.release(request)
        request.num_blocks = 0
        request.room_tokens = 0
        self.count_hashed(request, 0)

    def count_hashed(self, request: Request, blocks: i64) -> None:
        """Note that so many leading blocks of the request are cached."""
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
    """Return an empty cache of so many blocks; None: one that never evicts."""
    return SingleGroupCache(SegmentPool(UNLIMITED if usable_blocks is None else usable_blocks + 1), block_size)


class FactualCache(SingleGroupCache):
    """A KV cache that never evicts. Each request hits ``hit_limit`` blocks of its chain, whose keys are known: those
    that are cached, which other requests may hold, and blocks that nobody holds in place of the others."""

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
        """Cache the leading blocks of the request's chain, without a holder."""
        table = BlockTable(request.keys, first_key=request.first_key, known_keys=request.known_keys)
        held = self.pool.hold(table, blocks)
        self.pool.take(blocks - held)
        table.num_blocks = blocks
        self.pool.publish(table, held, blocks)
        self.pool.release(table)
