"""vLLM's block pool, block by block: the free queue, in the order of reuse, and the prefix cache of several KV groups.

The rules are numbered as in docs/simulator.md. ``sim.vllm.segments`` is the pool of one KV group of full attention,
whose blocks need no objects. mypyc compiles this module.
"""

from typing import Final

from mypy_extensions import i64

NONE: Final = -1


class Block:
    """A block of the pool. ``first_key``: of its keys; ``tokens``: up to the end of the prefix under that key."""

    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.references: i64 = 0
        self.tokens: i64 = 0
        self.first_key: CachedKey | None = None
        self.before: Block = self
        self.after: Block = self

    def is_cached_as(self, index: "KeyIndex", key: i64) -> bool:
        """Return whether the block is cached under a key of ``index``."""
        cached = self.first_key
        while cached is not None:
            if cached.key == key and cached.index is index:
                return True
            cached = cached.next_key
        return False


class KeyIndex:
    """Prefix cache of a KV group: that of keys that all requests may look up, or that of private blocks."""

    def __init__(self, is_known: bool) -> None:
        self.is_known: bool = is_known
        self.first: dict[int, CachedKey] = {}
        """By key: the first in line for it, whose block a lookup gets."""
        self.new_states: set[int] = set()
        """Keys of states cached in the step that is composed: no other request of this step may read them."""


class CachedKey:
    """A key of a block. Those with the same key are in line, a ring in the order in which they were cached (rule 7)."""

    def __init__(self, index: KeyIndex, key: i64, block: Block) -> None:
        self.index: KeyIndex = index
        self.key: i64 = key
        self.block: Block = block
        self.next_key: CachedKey | None = None
        """The block's next key."""
        self.before: CachedKey = self
        self.after: CachedKey = self


class Table:
    """A request's blocks in one KV group; the null block stands for those that attention does not need."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_cached: i64 = NONE
        """Leading blocks that need no caching any more; NONE: nothing was cached or hit."""
        self.partial: i64 = NONE
        """Position of the block that a hit ends in, which is copied before it is written."""
        self.source: Block | None = None
        """That block."""
        self.allocated: bool = False
        self.last_state: i64 = NONE
        self.retired: i64 = 0
        self.checkpoint: i64 = NONE
        """Tokens at which this step stores a state on its way."""
        self.checkpoint_position: i64 = NONE
        """Position of the block of that state."""


NO_TABLES: Final[list[Table]] = []


class BlockPool:
    """The free queue and the prefix cache of ``num_gpu_blocks`` blocks, the null block included (rule 1).

    A block has an object from when it is first taken.
    """

    def __init__(self, num_gpu_blocks: i64) -> None:
        self.num_blocks: i64 = num_gpu_blocks - 1
        self.num_free: i64 = num_gpu_blocks - 1
        self.evicted_blocks: i64 = 0
        self.num_repeated: i64 = 0
        """Holds of blocks that another request held before."""
        self.has_changed: bool = False
        """A block was freed, or a known key cached or forgotten, since this was last set to False."""
        self.null: Block = Block(0)
        """Both ends of the free queue, too."""
        self._num_taken: i64 = 0
        self._untaken: Block = Block(NONE)
        """In the free queue, the blocks that were never taken."""
        _link_after(self.null, self._untaken)
        self._nowhere: CachedKey = CachedKey(KeyIndex(False), 0, self.null)

    def hold(self, block: Block) -> None:
        """Rule 4: hold a hit block once more; one without a holder leaves the free queue."""
        if block.references == 0:
            _unlink(block)
            self.num_free -= 1
        else:
            self.num_repeated += 1
        block.references += 1

    def take(self) -> Block:
        """Rule 2: take the block at the queue's head, evicting what it cached. The caller has checked num_free."""
        if self.num_free == 0:
            raise ValueError("cannot take a block: none is free")
        block = self.null.after
        if block is self._untaken:
            self._num_taken += 1
            block = Block(self._num_taken)
            if self._num_taken == self.num_blocks:
                _unlink(self._untaken)
        else:
            if block.first_key is not None:
                self.forget(block)
                self.evicted_blocks += 1
            _unlink(block)
        block.references = 1
        self.num_free -= 1
        return block

    def release(self, block: Block, last: Block) -> Block:
        """Rule 3: release a block; one with a key joins the queue's tail, one without its head, behind ``last``.

        Return the last block that joined the head: the null block before the first one.
        """
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

    def release_range(self, blocks: list[Block], first: i64, end: i64) -> None:
        """Release a table's blocks from ``first`` to ``end``, leaf first; the null block takes their places."""
        null = self.null
        last = null
        position = end - 1
        while position >= first:
            block = blocks[position]
            if block is not null:
                last = self.release(block, last)
                blocks[position] = null
            position -= 1

    def add_key(self, block: Block, index: KeyIndex, key: i64) -> None:
        """Rule 5: cache a block under a key, beside those that it has; the last in line for it."""
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
        if index.is_known:
            self.has_changed = True
        last_key = block.first_key
        if last_key is None:
            block.first_key = cached
            return
        while last_key.next_key is not None:
            last_key = last_key.next_key
        last_key.next_key = cached

    def forget(self, block: Block) -> None:
        """Take all keys of a block out of the cache."""
        while block.first_key is not None:
            self.forget_first_key(block)

    def forget_first_key(self, block: Block) -> None:
        """Take the first key of a block out of the cache."""
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
        cached.before = cached.after = self._nowhere  # no cycle is left
        if index.is_known:
            self.has_changed = True

    def cache_prefix(self, block: Block, index: KeyIndex, key: i64, tokens: i64) -> None:
        """Cache a block, if it is not the null block, under the prefix of ``tokens`` that ends inside it."""
        if block is self.null:
            return
        if block.first_key is not None and block.tokens < tokens and not block.is_cached_as(index, key):
            self.forget(block)
        if block.first_key is None:
            block.tokens = tokens
        self.add_key(block, index, key)

    def reset(self) -> bool:
        """Forget every key, unless a block is held: then change nothing and return False, as vLLM does."""
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
