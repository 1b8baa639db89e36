"""vLLM's block pool: the free block queue in eviction order, and the prefix cache.

Fields of a block are in parallel arrays by block id, so that a block needs no object and leaves the free queue in
constant time. Block 0, vLLM's null block, never holds tokens; here it is also the sentinel that closes the free block
queue into a ring: ``_next_free[0]`` is the head, where blocks are allocated, ``_previous_free[0]`` the tail.

A request's blocks are freed leaf first, so that the leaf of a prompt is evicted before the root; blocks with a hash
join the tail (least recently freed is evicted first), blocks without a hash the head.
"""

from collections.abc import Iterable, Sequence
from itertools import islice


class BlockPool:
    """The free queue and the prefix cache over ``num_gpu_blocks`` blocks of ``block_size`` tokens.

    Keys are any integers; equal keys mean equal content up to and including that block.
    """

    __slots__ = (
        "_cached",
        "_key",
        "_next_free",
        "_other_keys",
        "_previous_free",
        "_references",
        "block_size",
        "enable_prefix_caching",
        "evicted_blocks",
        "num_free",
        "num_gpu_blocks",
        "num_repeated",
    )

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = num_gpu_blocks - 1
        self.evicted_blocks = 0
        self.num_repeated = 0
        """Holds of blocks that another request held before: the step reads their KV more than once."""
        self._references = [0] * num_gpu_blocks
        self._key: list[int | None] = [None] * num_gpu_blocks
        self._next_free = [*range(1, num_gpu_blocks), 0]
        self._previous_free = [num_gpu_blocks - 1, *range(num_gpu_blocks - 1)]
        # Key to the block that has it, or to the blocks in insertion order; lookups get the first.
        self._cached: dict[int, int | dict[int, None]] = {}
        # Further keys of a block than of its complete content: prefixes that end inside it (several groups only).
        self._other_keys: dict[int, set[int]] = {}

    def lookup(self, keys: Sequence[int], most: int) -> list[int]:
        """Blocks of the leading ``keys`` that are cached, up to the first miss and at most ``most`` of them."""
        if not self.enable_prefix_caching:
            return []
        cached = self._cached.get
        hits = []
        for key in islice(keys, most):
            block = cached(key)
            if block is None:
                break
            hits.append(next(iter(block)) if isinstance(block, dict) else block)
        return hits

    def first_of(self, key: int) -> int | None:
        """Return the cached block of ``key``; None: not cached."""
        result = self._cached.get(key)
        return next(iter(result)) if isinstance(result, dict) else result

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return the number of idle ``blocks``, which a prefix hit removes from the free queue."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to hit ``blocks`` (vLLM's ``touch``); idle blocks leave the free queue."""
        references, following, previous = self._references, self._next_free, self._previous_free
        for block in blocks:
            if references[block] == 0:
                after, before = following[block], previous[block]
                following[before] = after
                previous[after] = before
                self.num_free -= 1
            else:
                self.num_repeated += 1
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Pop ``count`` blocks from the head of the free queue and evict their prefixes; ``num_free`` is checked."""
        if count > self.num_free:
            raise ValueError(f"cannot take {count} blocks: {self.num_free} are free")
        following, keys, references = self._next_free, self._key, self._references
        allocated = []
        block = following[0]
        for _ in range(count):
            allocated.append(block)
            references[block] = 1
            if keys[block] is not None:
                self.forget(block)
                self.evicted_blocks += 1
            block = following[block]
        following[0] = block
        self._previous_free[block] = 0
        self.num_free -= count
        return allocated

    def insert(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Add full ``blocks`` to the prefix cache under ``keys``; earlier blocks of a key are hit first."""
        if not self.enable_prefix_caching:
            return
        cached, key_of = self._cached, self._key
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is not None:  # of a prefix that ended inside it
                self.forget(block)
            key_of[block] = key
            if cached.setdefault(key, block) != block:
                self._join_twins(block, key)

    def insert_also(self, block: int, key: int) -> None:
        """Add ``block`` to the prefix cache under a further ``key``."""
        if key in self.keys_of(block):
            return
        if self._key[block] is None:
            self._key[block] = key
        else:
            self._other_keys.setdefault(block, set()).add(key)
        if self._cached.setdefault(key, block) != block:
            self._join_twins(block, key)

    def keys_of(self, block: int) -> list[int]:
        """Return all keys of ``block``, that of its content first."""
        key = self._key[block]
        return [] if key is None else [key, *self._other_keys.get(block, ())]

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Free a request's ``blocks``, given root to leaf; blocks without another holder join the free queue."""
        references, keys = self._references, self._key
        to_head: list[int] = []
        to_tail: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                is_hashed = keys[block] is not None
                (to_tail if is_hashed else to_head).append(block)
            else:
                self.num_repeated -= 1
        self._link_after(0, to_head)
        self._link_after(self._previous_free[0], to_tail)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache (``reset_prefix_cache``); False, and no change, while a block is held."""
        if self.num_free != self.num_gpu_blocks - 1:
            return False
        self._cached.clear()
        self._other_keys.clear()
        self._key = [None] * self.num_gpu_blocks
        return True

    def free_order(self) -> list[int]:
        """Ids of the free blocks, in eviction order."""
        order = []
        block = self._next_free[0]
        while block != 0:
            order.append(block)
            block = self._next_free[block]
        return order

    def key_of(self, block: int) -> int | None:
        return self._key[block]

    def _link_after(self, before: int, blocks: Sequence[int]) -> None:
        following, previous = self._next_free, self._previous_free
        after = following[before]
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = after
        previous[after] = before
        self.num_free += len(blocks)

    def _join_twins(self, block: int, key: int) -> None:
        line = self._cached[key]
        if not isinstance(line, dict):
            self._cached[key] = line = {line: None}
        line[block] = None

    def forget(self, block: int) -> list[int]:
        """Take all keys of ``block`` out of the cache, and return them, that of its content first."""
        keys = self.keys_of(block)
        self._key[block] = None
        self._other_keys.pop(block, None)
        for key in keys:
            line = self._cached[key]
            if isinstance(line, dict) and len(line) > 1:
                del line[block]
            else:
                del self._cached[key]
        return keys
