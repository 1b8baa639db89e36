"""vLLM's block pool: the free queue, in the order of reuse, and the prefix cache.

Everything about a block is at its id in parallel arrays, so that a block costs no object and any of them leaves the
free queue in constant time. Block 0, vLLM's null block, never holds tokens; here it is also the sentinel that closes
the free queue into a ring: ``_next_free[0]`` is the head, where blocks are taken, ``_previous_free[0]`` the tail.

The queue's order is the eviction order. A request's blocks come back tail first, so that of one prompt the leaf goes
before the root; blocks with a hash join the tail (least recently freed is evicted first), blocks without one the head.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from sim.vllm.rules import FREE_RULES, FreeRule, goes_to_tail


class BlockPool:
    """The free queue and the prefix cache over ``num_gpu_blocks`` blocks of ``block_size`` tokens.

    Keys are any integers; equal keys mean equal content up to and including that block.
    """

    __slots__ = (
        "_cached",
        "_free_rule",
        "_key",
        "_next_free",
        "_next_twin",
        "_previous_free",
        "_previous_twin",
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
        free_rule: FreeRule = "vllm",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = num_gpu_blocks - 1
        self.evicted_blocks = 0
        self.num_repeated = 0
        """Holds of blocks that another request held before: the step reads their KV more than once."""
        self._free_rule = FREE_RULES.index(free_rule)
        self._references = [0] * num_gpu_blocks
        self._key: list[int | None] = [None] * num_gpu_blocks
        self._next_free = [*range(1, num_gpu_blocks), 0]
        self._previous_free = [num_gpu_blocks - 1, *range(num_gpu_blocks - 1)]
        # Key to the block that lookups get: the first inserted. Blocks of one key form a ring in insertion order, so
        # that the next in line takes over in constant time when the first is evicted.
        self._cached: dict[int, int] = {}
        self._next_twin = list(range(num_gpu_blocks))
        self._previous_twin = list(range(num_gpu_blocks))

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
            hits.append(block)
        return hits

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` have no holder: a hit on them takes them out of the free queue."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold hit ``blocks`` once more; idle ones leave the free queue."""
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

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks from the queue's head, evicting what they cached. The caller has checked num_free."""
        if count > self.num_free:
            raise ValueError(f"cannot take {count} blocks: {self.num_free} are free")
        following, keys, references = self._next_free, self._key, self._references
        taken = []
        block = following[0]
        for _ in range(count):
            taken.append(block)
            references[block] = 1
            if keys[block] is not None:
                self._forget(block)
                self.evicted_blocks += 1
            block = following[block]
        following[0] = block
        self._previous_free[block] = 0
        self.num_free -= count
        return taken

    def insert(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make full ``blocks`` findable under ``keys``, in that order. Blocks of a key already cached stand in line."""
        if not self.enable_prefix_caching:
            return
        cached, key_of = self._cached, self._key
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            first = cached.setdefault(key, block)
            if first != block:
                self._join_twins(block, first)

    def release(self, blocks: Sequence[int]) -> None:
        """Release one request's ``blocks``, given root to leaf; blocks without another holder become free."""
        references, keys = self._references, self._key
        to_head: list[int] = []
        to_tail: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                is_hashed = keys[block] is not None
                (to_tail if goes_to_tail(self._free_rule, is_hashed) else to_head).append(block)
            else:
                self.num_repeated -= 1
        self._link_after(0, to_head)
        self._link_after(self._previous_free[0], to_tail)

    def reset_prefix_cache(self) -> bool:
        """Forget every key, unless a block is held: then change nothing and return False, as vLLM does."""
        if self.num_free != self.num_gpu_blocks - 1:
            return False
        self._cached.clear()
        self._key = [None] * self.num_gpu_blocks
        self._next_twin = list(range(self.num_gpu_blocks))
        self._previous_twin = list(range(self.num_gpu_blocks))
        return True

    def free_order(self) -> list[int]:
        """Ids of the free blocks, next to be taken first."""
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

    def _join_twins(self, block: int, first: int) -> None:
        last = self._previous_twin[first]
        self._next_twin[last] = block
        self._previous_twin[block] = last
        self._next_twin[block] = first
        self._previous_twin[first] = block

    def _forget(self, block: int) -> None:
        key = self._key[block]
        assert key is not None
        self._key[block] = None
        following, previous = self._next_twin[block], self._previous_twin[block]
        if following == block:
            del self._cached[key]
            return
        self._next_twin[previous] = following
        self._previous_twin[following] = previous
        self._next_twin[block] = self._previous_twin[block] = block
        if self._cached[key] == block:
            self._cached[key] = following

    def check_integrity(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError unless queue, references and cache agree; ``held``: every holder's blocks, if known."""
        order = self.free_order()
        assert len(order) == len(set(order)) == self.num_free, "the queue's length is not num_free"
        assert set(order) == {b for b in range(1, self.num_gpu_blocks) if self._references[b] == 0}
        for block in (0, *order):
            assert self._previous_free[self._next_free[block]] == block, f"block {block}: links disagree"
        assert self._references[0] == 0, "the null block is held"
        assert self._key[0] is None, "the null block is cached"
        self._check_cache()
        if held is not None:
            counts = [0] * self.num_gpu_blocks
            for blocks in held:
                for block in blocks:
                    counts[block] += 1
            assert counts == self._references, "references are not the holders'"
        repeated = sum(references - 1 for references in self._references if references > 1)
        assert repeated == self.num_repeated, "the repeated holds are not the references beyond the first"

    def _check_cache(self) -> None:
        keyed = {block for block, key in enumerate(self._key) if key is not None}
        for key, first in self._cached.items():
            block = first
            while True:
                assert self._key[block] == key, f"block {block} stands in the line of key {key}"
                keyed.remove(block)
                assert self._previous_twin[self._next_twin[block]] == block, f"block {block}: twins disagree"
                block = self._next_twin[block]
                if block == first:
                    break
        assert not keyed, f"blocks {sorted(keyed)} have a key and are in no line"
