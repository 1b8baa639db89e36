"""vLLM's block pool, an object per block: the free block queue in eviction order, and the prefix cache of KV groups.

docs/simulator.md numbers the rules. ``sim.vllm.segments`` is the pool of a single KV group of full attention, which
needs no object per block. mypyc compiles this module.
"""

from typing import Final

from mypy_extensions import i64

NONE: Final = -1


class Block:
    """KV cache block (vLLM's ``KVCacheBlock``). ``references``: requests that hold the block. ``first_key``: head of
    its list of keys. ``tokens``: length of the prefix under that key. ``before``, ``after``: neighbors in the free
    queue."""

    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.references: i64 = 0
        self.tokens: i64 = 0
        self.first_key: CachedKey | None = None
        self.before: Block = self
        self.after: Block = self

    def is_cached_as(self, index: "KeyIndex", key: i64) -> bool:
        """Return whether the block is in the prefix cache ``index`` under ``key``."""
        cached = self.first_key
        while cached is not None:
            if cached.key == key and cached.index is index:
                return True
            cached = cached.next_key
        return False


class KeyIndex:
    """Prefix cache of a KV group: block by key. ``is_shared``: every request may hit; else keys are private."""

    def __init__(self, is_shared: bool) -> None:
        self.is_shared: bool = is_shared
        self.first: dict[int, CachedKey] = {}
        """Entry by key that was cached first; a lookup returns its block."""
        self.new_states: set[int] = set()
        """Keys of states cached in the current step: no other request of this step may hit them."""


class CachedKey:
    """Key of a cached block. Entries with equal keys form a ring, in the order in which they were cached (rule 7)."""

    def __init__(self, index: KeyIndex, key: i64, block: Block) -> None:
        self.index: KeyIndex = index
        self.key: i64 = key
        self.block: Block = block
        self.next_key: CachedKey | None = None
        """The block's next key."""
        self.before: CachedKey = self
        self.after: CachedKey = self


class Table:
    """Block table of a request in one KV group; the null block replaces blocks that attention no longer needs."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_cached: i64 = NONE
        """Leading blocks already cached, or not worth caching; NONE: nothing was cached or hit."""
        self.partial: i64 = NONE
        """Position of the block in which a prefix hit ends: copied before the request writes to it."""
        self.source: Block | None = None
        """Cached block to copy."""
        self.allocated: bool = False
        self.last_state: i64 = NONE
        self.retired: i64 = 0
        self.checkpoint: i64 = NONE
        """Tokens after which the kernel stores a state inside this step."""
        self.checkpoint_position: i64 = NONE
        """Position of the block of the stored state."""


NO_TABLES: Final[list[Table]] = []


class BlockPool:
    """Free block queue and prefix cache of ``num_gpu_blocks`` blocks, the null block included (rule 1).

    A block's object is created at its first allocation.
    """

    def __init__(self, num_gpu_blocks: i64) -> None:
        self.num_blocks: i64 = num_gpu_blocks - 1
        self.num_free: i64 = num_gpu_blocks - 1
        self.evicted_blocks: i64 = 0
        self.num_repeated: i64 = 0
        """References to blocks beyond the first: blocks that requests share."""
        self.has_changed: bool = False
        """A block was freed, or a shared key cached or evicted, since the caller last reset this flag."""
        self.null: Block = Block(0)
        """The null block; also both ends of the free block queue."""
        self._num_created: i64 = 0
        self._uncreated: Block = Block(NONE)
        """Entry of the free block queue for all blocks that were never allocated."""
        _link_after(self.null, self._uncreated)
        self._unlinked: CachedKey = CachedKey(KeyIndex(False), 0, self.null)

    def touch(self, block: Block) -> None:
        """Rule 4: add a reference to a hit block (vLLM's ``touch``); an idle block leaves the free block queue."""
        if block.references == 0:
            _unlink(block)
            self.num_free -= 1
        else:
            self.num_repeated += 1
        block.references += 1

    def allocate(self) -> Block:
        """Rule 2: pop the head of the free block queue, never empty here, and evict its prefix (``get_new_blocks``)."""
        if self.num_free == 0:
            raise ValueError("cannot allocate a block: no block is free")
        block = self.null.after
        if block is self._uncreated:
            self._num_created += 1
            block = Block(self._num_created)
            if self._num_created == self.num_blocks:
                _unlink(self._uncreated)
        else:
            if block.first_key is not None:
                self.forget(block)
                self.evicted_blocks += 1
            _unlink(block)
        block.references = 1
        self.num_free -= 1
        return block

    def free_block(self, block: Block, last: Block) -> Block:
        """Rule 3: drop a reference. An idle block joins the free block queue: a cached block at the tail, an uncached
        block at the head, after ``last``. Return the last block that joined the head; the null block: none did."""
        block.references -= 1
        if block.references > 0:
            self.num_repeated -= 1
            return last
        self.num_free += 1
        self.has_changed = True
        if block.first_key is not None:
            _link_after(self.null.before, block)
            return last
        _link_after(last, block)
        return block

    def free_range(self, blocks: list[Block], first: i64, end: i64) -> None:
        """Free a block table's blocks from ``first`` to ``end``, leaf first, and replace them by the null block."""
        null = self.null
        last = null
        position = end - 1
        while position >= first:
            block = blocks[position]
            if block is not null:
                last = self.free_block(block, last)
                blocks[position] = null
            position -= 1

    def add_key(self, block: Block, index: KeyIndex, key: i64) -> None:
        """Rule 5: add a block to the prefix cache under a key; earlier blocks under the key are hit first."""
        if block.is_cached_as(index, key):
            return
        cached = CachedKey(index, key, block)
        first = index.first.setdefault(key, cached)
        if first is not cached:
            last = first.before
            last.after = cached
            cached.before = last
            cached.after = first
            first.before = cached
        if index.is_shared:
            self.has_changed = True
        last_key = block.first_key
        if last_key is None:
            block.first_key = cached
            return
        while last_key.next_key is not None:
            last_key = last_key.next_key
        last_key.next_key = cached

    def forget(self, block: Block) -> None:
        """Remove a block from the prefix cache, under all of its keys."""
        while block.first_key is not None:
            self.forget_first_key(block)

    def forget_first_key(self, block: Block) -> None:
        """Remove the first key of a block from the prefix cache."""
        cached = block.first_key
        assert cached is not None
        block.first_key = cached.next_key
        index = cached.index
        heir = cached.after
        if heir is cached:
            del index.first[cached.key]
        else:
            if index.first[cached.key] is cached:
                index.first[cached.key] = heir
            cached.before.after = heir
            heir.before = cached.before
        cached.before = cached.after = self._unlinked  # no cycle is left
        if index.is_shared:
            self.has_changed = True

    def cache_prefix(self, block: Block, index: KeyIndex, key: i64, tokens: i64) -> None:
        """Cache a block under the prefix of ``tokens`` that ends inside the block; not the null block."""
        if block is self.null:
            return
        if block.first_key is not None and block.tokens < tokens and not block.is_cached_as(index, key):
            self.forget(block)
        if block.first_key is None:
            block.tokens = tokens
        self.add_key(block, index, key)

    def reset(self) -> bool:
        """Empty the prefix cache (vLLM's ``reset_prefix_cache``); False, and no change, while a block is held."""
        if self.num_free != self.num_blocks:
            return False
        block = self.null.after
        while block is not self.null:
            self.forget(block)
            block = block.after
        return True


def _link_after(before: Block, block: Block) -> None:
    after = before.after
    before.after = block
    block.before = before
    block.after = after
    after.before = block


def _unlink(block: Block) -> None:
    before = block.before
    after = block.after
    before.after = after
    after.before = before
