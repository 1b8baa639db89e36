"""Host memory behind the pool, as vLLM's offloading connector has it. mypyc compiles this module.

A tier keeps blocks by key, the least recently used first out. Blocks of computed prompts are stored after each step,
all of a step's or none. A request that is admitted and finds further blocks of its chain there holds room for them and
waits beside the others for their transfer. Its blocks count as used when it ends, the leaf before the root. Transfers
of one direction follow each other: one that is asked for waits for those before it, and for its blocks to be there.
"""

from typing import Final

from mypy_extensions import i64

from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import Request
from sim.vllm.segments import KNOWN

WAIT: Final = -1
NEVER_MS: Final = float("-inf")
BlockKey = tuple[i64, i64]
"""KNOWN and a key; or, of a private block, the request's index and the depth."""


class TierBlock:
    """A block that a tier keeps, readable from ``ready_ms`` on and in transit until ``busy_ms``.

    ``round``: the last look at blocks that must not displace each other.
    """

    def __init__(self, key: BlockKey) -> None:
        self.key: BlockKey = key
        self.ready_ms: float = NEVER_MS
        self.busy_ms: float = NEVER_MS
        self.round: i64 = 0
        self.older: TierBlock = self
        self.newer: TierBlock = self


class Tier:
    """Memory of ``capacity`` blocks, its link, and its blocks by last use.

    ``…_free_ms``: the end of the transfers asked for so far.
    """

    def __init__(self, capacity: i64, token_ms: float, latency_ms: float) -> None:
        self.capacity: i64 = capacity
        self.token_ms: float = token_ms
        self.latency_ms: float = latency_ms
        self.read_free_ms: float = NEVER_MS
        self.write_free_ms: float = NEVER_MS
        self.blocks: dict[BlockKey, TierBlock] = {}
        self.evicted: i64 = 0
        self.stored: i64 = 0
        """Blocks written so far."""
        self.now_ms: float = NEVER_MS
        self.round: i64 = 0
        self._ends: TierBlock = TierBlock((KNOWN, 0))
        """Both ends of the ring by use: ``newer`` is the least recently used block."""

    def has_room(self, blocks: i64) -> bool:
        """Return whether so many blocks are free, or may go: not in transit, nor of this round."""
        lacking = blocks - (self.capacity - i64(len(self.blocks)))
        block = self._ends.newer
        while lacking > 0 and block is not self._ends:
            if self._may_go(block):
                lacking -= 1
            block = block.newer
        return lacking <= 0

    def insert(self, key: BlockKey, ready_ms: float) -> None:
        """Keep a block, in place of the least recently used that may go if none is free."""
        if len(self.blocks) >= self.capacity:
            block = self._ends.newer
            while not self._may_go(block):
                block = block.newer
            del self.blocks[block.key]
            block.older.newer = block.newer
            block.newer.older = block.older
            block.older = block.newer = block  # no cycle is left
            self.evicted += 1
        block = TierBlock(key)
        block.ready_ms = block.busy_ms = ready_ms
        block.round = self.round
        self.blocks[key] = block
        self.renew(block)

    def renew(self, block: TierBlock) -> None:
        """Make a block the last used."""
        block.older.newer = block.newer
        block.newer.older = block.older
        last = self._ends.older
        last.newer = block
        block.older = last
        block.newer = self._ends
        self._ends.older = block

    def written_ms(self, blocks: i64, tokens: i64) -> float:
        """Write so many blocks, of so many tokens, at once; return the time at which they can be read."""
        begin_ms = max(self.now_ms, self.write_free_ms)
        self.write_free_ms = begin_ms + self.latency_ms + float(tokens) * self.token_ms
        self.stored += blocks
        return self.write_free_ms

    def _may_go(self, block: TierBlock) -> bool:
        return max(block.ready_ms, block.busy_ms) <= self.now_ms and block.round != self.round


class Offloading:
    """The host's memory behind the pool of ``cache``."""

    def __init__(self, cache: SingleGroupCache, host: Tier) -> None:
        self.cache: SingleGroupCache = cache
        self.block_size: i64 = cache.block_size
        self.host: Tier = host
        self.hits: i64 = 0
        """Blocks that the request last sought hits in the pool."""
        self.loading: list[Request] = []
        self.new_loads: list[Request] = []
        """Those of ``loading`` of whose end the step loop does not know."""
        self.ended: list[Request] = []
        """Requests that ended, whose blocks do not count as used yet."""
        self.loads: i64 = 0
        self.loaded_tokens: i64 = 0

    def begin_step(self, now_ms: float) -> None:
        """Set the time of the step that is composed."""
        self.host.now_ms = now_ms

    def seek(self, request: Request) -> i64:
        """Return the depth up to which the host has the blocks behind the hit that was just looked up.

        WAIT: another request is just loading some of them.
        """
        hits = self.hits = self.cache.hits
        if request.hit_limit == 0:
            return hits
        end = hits
        most = request.num_tokens // self.block_size
        while end < most:
            if key_at(request, end) not in self.host.blocks:
                break
            end += 1
        for other in self.loading:
            depth = max(hits, other.num_hashed)
            if depth < min(end, other.num_blocks) and key_at(request, depth) == key_at(other, depth):
                return WAIT
        return end

    def begin_load(self, request: Request, end: i64, running: list[Request]) -> bool:
        """Give the request room for its blocks up to ``end`` and load them; False: the pool has no room for them.

        ``running``: requests that will still take blocks for their prefill.
        """
        cache = self.cache
        num_free = cache.pool.num_free
        lacking = cache.pool.idle_hits - self.hits
        if cache.blocks_for(request.num_tokens) + lacking > num_free:
            return False
        if end + lacking > num_free - self._reserved_blocks(running):
            return False
        cache.adopt(request, self.hits)
        # First: blocks in transit are not displaced by what is stored.
        request.load_end_ms = self._load(request, self.hits, end)
        cache.take(request, end - self.hits)
        request.num_computed = min(end * self.block_size, request.num_tokens - 1)
        self.loading.append(request)
        self.new_loads.append(request)
        return True

    def store_step(self, requests: list[Request]) -> bool:
        """Store the blocks of prompts that a step computes; False: the host has no room for some now."""
        stored = True
        for request in requests:
            full = min(request.num_computed, request.prompt_tokens) // self.block_size
            first = request.num_offloaded
            if full <= first:
                continue
            if self._store(request, first, full):
                request.first_offloaded = min(request.first_offloaded, first)
                request.num_offloaded = full
            else:
                stored = False
        return stored

    def use_ended(self) -> None:
        """Count the blocks of ended requests as used."""
        for request in self.ended:
            depth = request.num_offloaded - 1
            while depth >= request.first_offloaded:
                block = self.host.blocks.get(key_at(request, depth))
                if block is not None:
                    self.host.renew(block)
                depth -= 1
        self.ended.clear()

    def _reserved_blocks(self, running: list[Request]) -> i64:
        """Count the blocks that requests will still take that are being loaded, or prefilled."""
        blocks: i64 = 0
        for request in running:
            blocks += max(self.cache.blocks_for(request.num_tokens) - request.num_blocks, 0)
        for request in self.loading:
            blocks += max(self.cache.blocks_for(request.num_tokens) - request.num_blocks, 0)
        return blocks

    def _load(self, request: Request, first: i64, end: i64) -> float:
        """Transfer blocks from ``first`` to ``end`` into the pool; return the time at which they are there."""
        host = self.host
        _, ready_ms = self._lacking(request, first, end)
        begin_ms = max(ready_ms, host.read_free_ms)
        request.first_offloaded = min(request.first_offloaded, first)
        request.num_offloaded = end
        tokens = (end - first) * self.block_size
        done_ms = begin_ms + host.latency_ms + float(tokens) * host.token_ms
        for depth in range(first, end):
            block = host.blocks.get(key_at(request, depth))
            if block is not None:
                block.busy_ms = max(block.busy_ms, done_ms)
        host.read_free_ms = done_ms
        self.loads += 1
        self.loaded_tokens += tokens
        return done_ms

    def _lacking(self, request: Request, first: i64, end: i64) -> tuple[i64, float]:
        """Count blocks that the host lacks, and mark the others of this round; return the time at which these are
        there."""
        missing: i64 = 0
        ready_ms = self.host.now_ms
        self.host.round += 1
        for depth in range(first, end):
            block = self.host.blocks.get(key_at(request, depth))
            if block is None:
                missing += 1
            else:
                block.round = self.host.round
                ready_ms = max(ready_ms, block.ready_ms)
        return missing, ready_ms

    def _store(self, request: Request, first: i64, end: i64) -> bool:
        """Store blocks that the host lacks; False: it has no room for them now."""
        host = self.host
        missing, _ = self._lacking(request, first, end)
        if missing == 0:
            return True
        if not host.has_room(missing):
            return False
        ready_ms = host.written_ms(missing, missing * self.block_size)
        for depth in range(first, end):
            key = key_at(request, depth)
            if key not in host.blocks:
                host.insert(key, ready_ms)
        return True


def key_at(request: Request, depth: i64) -> BlockKey:
    """Return the key of the request's block at ``depth``."""
    if depth < request.known_keys:
        return KNOWN, request.keys[request.first_key + depth]
    return request.index, depth
