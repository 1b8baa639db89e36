"""KV cache offloading to host memory, after vLLM's offloading connector. mypyc compiles this module.

A tier stores blocks by key and evicts the least recently used block. After each scheduler step the prompt blocks that
it computed are stored, per request all or none. A request that is admitted and has further blocks of its prefix in the
tier allocates blocks for them and waits for the transfer. Its blocks count as used when the request ends, the leaf
before the root. Transfers of one direction run one after another; a load also waits until its blocks are written.
"""

from typing import Final

from mypy_extensions import i64

from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import Request
from sim.vllm.segments import SHARED

WAIT: Final = -1
NEVER_MS: Final = float("-inf")
BlockKey = tuple[i64, i64]
"""SHARED and a block key; for a private block, the request's index and the depth."""


class TierBlock:
    """Block in a tier: readable from ``ready_ms`` on, in transit until ``busy_ms``.

    ``round``: number of the last lookup that included the block; blocks of one lookup do not evict each other.
    """

    def __init__(self, key: BlockKey) -> None:
        self.key: BlockKey = key
        self.ready_ms: float = NEVER_MS
        self.busy_ms: float = NEVER_MS
        self.round: i64 = 0
        self.older: TierBlock = self
        self.newer: TierBlock = self


class Tier:
    """Host memory of ``capacity`` KV cache blocks, its link, and its blocks in LRU order.

    ``token_ms``: transfer time of a token; ``latency_ms``: of a transfer; ``…_free_ms``: end of the queued transfers.
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
        self._ends: TierBlock = TierBlock((SHARED, 0))
        """Sentinel of the LRU ring: ``newer`` is the least recently used block."""

    def can_store(self, blocks: i64) -> bool:
        """Return whether ``blocks`` blocks are free or can be evicted: not in transit, not of this round."""
        missing = blocks - (self.capacity - i64(len(self.blocks)))
        block = self._ends.newer
        while missing > 0 and block is not self._ends:
            if self._is_evictable(block):
                missing -= 1
            block = block.newer
        return missing <= 0

    def insert(self, key: BlockKey, ready_ms: float) -> None:
        """Insert a block; if no block is free, evict the least recently used block."""
        if len(self.blocks) >= self.capacity:
            block = self._ends.newer
            while not self._is_evictable(block):
                block = block.newer
            del self.blocks[block.key]
            block.older.newer = block.newer
            block.newer.older = block.older
            block.older = block.newer = block  # no reference cycle is left
            self.evicted += 1
        block = TierBlock(key)
        block.ready_ms = block.busy_ms = ready_ms
        block.round = self.round
        self.blocks[key] = block
        self.touch(block)

    def touch(self, block: TierBlock) -> None:
        """Make a block the most recently used."""
        block.older.newer = block.newer
        block.newer.older = block.older
        last = self._ends.older
        last.newer = block
        block.older = last
        block.newer = self._ends
        self._ends.older = block

    def write(self, blocks: i64, tokens: i64) -> float:
        """Write ``blocks`` blocks of ``tokens`` in one transfer; return the time in ms at which they are readable."""
        begin_ms = max(self.now_ms, self.write_free_ms)
        self.write_free_ms = begin_ms + self.latency_ms + float(tokens) * self.token_ms
        self.stored += blocks
        return self.write_free_ms

    def _is_evictable(self, block: TierBlock) -> bool:
        return max(block.ready_ms, block.busy_ms) <= self.now_ms and block.round != self.round


class Offloading:
    """Offloading of the block pool of ``cache`` to host memory."""

    def __init__(self, cache: SingleGroupCache, host: Tier) -> None:
        self.cache: SingleGroupCache = cache
        self.block_size: i64 = cache.block_size
        self.host: Tier = host
        self.hits: i64 = 0
        """Prefix hit of the last lookup in the block pool, in blocks."""
        self.loading: list[Request] = []
        self.new_loads: list[Request] = []
        """Requests of ``loading`` whose end the step loop has not scheduled yet."""
        self.finished: list[Request] = []
        """Requests that ended since the last ``touch_finished``."""
        self.loads: i64 = 0
        self.loaded_tokens: i64 = 0

    def begin_step(self, now_ms: float) -> None:
        """Set the time at which the scheduler composes the step."""
        self.host.now_ms = now_ms

    def find_prefix(self, request: Request) -> i64:
        """Return the depth up to which host memory extends the prefix hit just looked up (vLLM's
        ``get_num_new_matched_tokens``). WAIT: another request is loading blocks of the same prefix."""
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
        """Allocate the request's blocks up to ``end`` and load them; False: too few free blocks in the pool.

        ``running``: requests that still need blocks for their prefill.
        """
        cache = self.cache
        num_free = cache.pool.num_free
        missing = cache.pool.idle_hits - self.hits
        if cache.blocks_for(request.num_tokens) + missing > num_free:
            return False
        if end + missing > num_free - self._reserved_blocks(running):
            return False
        cache.adopt(request, self.hits)
        # Before the stores of this step: blocks in transit are not evicted.
        request.load_end_ms = self._load(request, self.hits, end)
        cache.allocate(request, end - self.hits)
        request.num_computed = min(end * self.block_size, request.num_tokens - 1)
        self.loading.append(request)
        self.new_loads.append(request)
        return True

    def store_blocks(self, requests: list[Request]) -> bool:
        """Store the prompt blocks that a scheduler step computes; False: host memory cannot take all of them now."""
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

    def touch_finished(self) -> None:
        """Make the blocks of finished requests the most recently used, the leaf before the root."""
        for request in self.finished:
            depth = request.num_offloaded - 1
            while depth >= request.first_offloaded:
                block = self.host.blocks.get(key_at(request, depth))
                if block is not None:
                    self.host.touch(block)
                depth -= 1
        self.finished.clear()

    def _reserved_blocks(self, running: list[Request]) -> i64:
        """Count the blocks that loading and prefilling requests still need."""
        blocks: i64 = 0
        for request in running:
            blocks += max(self.cache.blocks_for(request.num_tokens) - request.num_blocks, 0)
        for request in self.loading:
            blocks += max(self.cache.blocks_for(request.num_tokens) - request.num_blocks, 0)
        return blocks

    def _load(self, request: Request, first: i64, end: i64) -> float:
        """Transfer blocks from ``first`` to ``end`` into the block pool; return the end of the transfer, in ms."""
        host = self.host
        _, ready_ms = self._find_missing(request, first, end)
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

    def _find_missing(self, request: Request, first: i64, end: i64) -> tuple[i64, float]:
        """Count the blocks missing in host memory and protect the present blocks from eviction in this round; return
        the count and the time from which the present blocks are readable, in ms."""
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
        """Store the blocks that are missing in host memory; False: it cannot take them now."""
        host = self.host
        missing, _ = self._find_missing(request, first, end)
        if missing == 0:
            return True
        if not host.can_store(missing):
            return False
        ready_ms = host.write(missing, missing * self.block_size)
        for depth in range(first, end):
            key = key_at(request, depth)
            if key not in host.blocks:
                host.insert(key, ready_ms)
        return True


def key_at(request: Request, depth: i64) -> BlockKey:
    """Return the key of the request's block at ``depth``."""
    if depth < request.num_keys:
        return SHARED, request.keys[request.first_key + depth]
    return request.index, depth
