"""Prefix hits of the live traffic at every cache size, from block hashes alone, online and in bounded memory.

The policy is that of ``sim curve``: LRU over full blocks; a prompt's hits count, short of its last token, then its
blocks and its output's are touched leaf to root. Requests come as they end, when their output is known. So the depth of
a block is the smallest size at which it hits (Mattson et al., 1970). Depths only grow along a chain: each block can be
judged by itself, and a sample of blocks is enough.

The ``exact_blocks`` touched last are all held, and hits there are exact. Of deeper blocks a sample is held, chosen by
hash, one in ``1 / rate`` (Waldspurger et al., SHARDS, 2015): a hit counts 1 / rate times, and its depth is the exact
part plus 1 / rate times its place in the rest of the sample. Popular prefixes are in the exact part, so they do not
multiply the error. The standard error of n deeper hits is √(n (1 − rate) / rate): 0.8 % for a million at 1/64.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tap.admin.timeline import Window

EXACT_BLOCKS: Final = 65_536
SAMPLE_BLOCKS: Final = 65_536
RATE: Final = 1 / 64
"""With 16-token blocks exact to 1 million tokens, sampled to 67 million."""
GROUP: Final = 1024
SLACK: Final = 4
"""Slots for each block of capacity: blocks move together once in (SLACK − 1) × capacity touches."""
_LOW_BITS: Final = (1 << 24) - 1
_PER_OCTAVE: Final = 16

SIZES: Final = tuple(sorted({round(2 ** (step / _PER_OCTAVE)) for step in range(24 * _PER_OCTAVE + 1)}))
"""Cache sizes of the curve, in blocks: a sixteenth of an octave apart, up to 2²⁴."""


class RecencyStack:
    """At most ``capacity`` blocks by recency, each with its depth; the block touched longest ago leaves first.

    Each touch takes the next slot of a byte map; the depth of a block is the number of slots taken after its own,
    counted by group in C: faster than a tree. When the slots run out, the blocks move together. Plain Python, unlike
    the compiled ``measure.cache.stackdepth``: numba would triple the memory of the admin process.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        slots = -(-SLACK * max(capacity, 1) // GROUP) * GROUP
        self._slot_of: dict[int, int] = {}
        self._block_at = array("Q", bytes(8 * slots))
        self._taken = bytearray(slots)
        self._by_group = [0] * (slots // GROUP)
        self._next = 0
        self._oldest = 0
        """No slot before this one is taken."""

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slot_of)

    def __contains__(self, block: int) -> bool:
        return block in self._slot_of

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """Return the depth of each leading block that is held, 1 for the block touched last; end at the first miss.

        Blocks that were touched in reverse succession are neighbours: each is one deeper than the one before.
        """
        found: list[int] = []
        slot_of = self._slot_of
        depth, expected = 0, -1
        for block in blocks:
            slot = slot_of.get(block)
            if slot is None:
                break
            depth = depth + 1 if slot == expected else self._depth_of_slot(slot)
            expected = slot - 1
            found.append(depth)
        return found

    def touch(self, blocks: Iterable[int]) -> list[int]:
        """Touch the blocks in this order; return the blocks that had to leave."""
        evicted: list[int] = []
        slot_of, block_at, taken, by_group = self._slot_of, self._block_at, self._taken, self._by_group
        for block in blocks:
            slot = slot_of.get(block)
            if slot is not None:
                taken[slot] = 0
                by_group[slot // GROUP] -= 1
            if self._next == len(taken):
                self._move_together()
            slot_of[block] = slot = self._next
            block_at[slot] = block
            taken[slot] = 1
            by_group[slot // GROUP] += 1
            self._next = slot + 1
            if len(slot_of) > self.capacity:
                evicted.append(self._evict())
        return evicted

    def check_integrity(self) -> None:
        taken = [slot for slot, mark in enumerate(self._taken) if mark]
        assert taken == sorted(self._slot_of.values())
        assert all(self._slot_of[self._block_at[slot]] == slot for slot in taken)
        assert sum(self._by_group) == len(taken)
        for number, count in enumerate(self._by_group):
            assert count == sum(self._taken[number * GROUP : (number + 1) * GROUP])
        assert not any(self._taken[: self._oldest])

    def _depth_of_slot(self, slot: int) -> int:
        group = slot // GROUP
        end = (group + 1) * GROUP
        last = self._next // GROUP + 1
        return self._taken.count(1, slot, end) + sum(self._by_group[group + 1 : last])

    def _evict(self) -> int:
        slot = self._taken.find(1, self._oldest)
        block = self._block_at[slot]
        self._oldest = slot + 1
        self._taken[slot] = 0
        self._by_group[slot // GROUP] -= 1
        del self._slot_of[block]
        return block

    def _move_together(self) -> None:
        block_at, taken = self._block_at, self._taken
        living = [block_at[slot] for slot in range(self._next) if taken[slot]]
        count = len(living)
        self._slot_of.update(zip(living, range(count), strict=True))
        block_at[:count] = array("Q", living)
        taken[:] = b"\1" * count + bytes(len(taken) - count)
        self._by_group[:] = [min(GROUP, max(0, count - start)) for start in range(0, len(taken), GROUP)]
        self._next, self._oldest = count, 0


@dataclass(slots=True)
class HitCounts:
    """Hits of some requests by the smallest of ``SIZES`` that has them, and the totals for their shares."""

    blocks: list[float] = field(default_factory=lambda: [0.0] * (len(SIZES) + 1))
    """The last entry: deeper than any size."""
    requests: int = 0
    prompt_tokens: int = 0
    """Of hashed requests: the whole of ``blocks``, in tokens."""
    reported_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "HitCounts") -> None:
        self.blocks = [mine + theirs for mine, theirs in zip(self.blocks, other.blocks, strict=True)]
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.reported_tokens += other.reported_tokens
        self.cached_tokens += other.cached_tokens

    def up_to_size(self) -> list[float]:
        total, hits = 0.0, []
        for count in self.blocks[:-1]:
            total += count
            hits.append(total)
        return hits


class CacheCurve:
    """Hits of the recent requests at every size; requests are taken in order."""

    def __init__(
        self,
        block_size: int,
        *,
        exact_blocks: int = EXACT_BLOCKS,
        sample_blocks: int = SAMPLE_BLOCKS,
        rate: float = RATE,
    ) -> None:
        self.block_size = block_size
        self._exact = RecencyStack(exact_blocks)
        self._sample = RecencyStack(sample_blocks)
        self._weight = 1.0 / rate
        self._threshold = round(rate * (_LOW_BITS + 1))
        """A block is in the sample if the low bits of its hash are below this: hashes are uniform."""
        self._sampled_exact = 0
        self._window = Window(HitCounts)

    @property
    def exact_blocks(self) -> int:
        return self._exact.capacity

    @property
    def deepest(self) -> int:
        return self._exact.capacity + int(self._sample.capacity * self._weight)

    def take(
        self,
        hashes: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int | None,
        now_s: float,
        outputs: Sequence[int] = (),
    ) -> int:
        """Count one request and touch its blocks; return how many leading blocks were in the exact part.

        ``hashes``: of its prompt. ``outputs``: of the blocks that its output filled, as far as known.
        """
        counts = self._window.bucket(now_s)
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        if cached_tokens is not None:
            counts.reported_tokens += prompt_tokens
            counts.cached_tokens += cached_tokens
        limit = max(0, min(len(hashes), (prompt_tokens - 1) // self.block_size))
        depths = self._exact.depths(hashes)
        _count_depths(counts, depths[:limit], 1.0)
        _count_depths(counts, self._sampled_depths(hashes[len(depths) : limit]), self._weight)
        self._touch([*hashes, *outputs] if outputs else hashes)
        return len(depths)

    def recent(self, now_s: float) -> HitCounts:
        total = HitCounts()
        for counts in self._window.buckets(now_s):
            total.add(counts)
        return total

    def check_integrity(self) -> None:
        self._exact.check_integrity()
        self._sample.check_integrity()
        assert self._sampled_exact == sum(self._in_sample(block) for block in self._exact)

    def _sampled_depths(self, below: Sequence[int]) -> list[float]:
        threshold, weight = self._threshold, self._weight
        sampled = [block for block in below if block & _LOW_BITS < threshold]
        first = self._sampled_exact + 1
        return [len(self._exact) + 1 + (place - first) * weight for place in self._sample.depths(sampled)]

    def _touch(self, hashes: Sequence[int]) -> None:
        threshold = self._threshold
        leaf_to_root = hashes[::-1]
        sampled = [block for block in leaf_to_root if block & _LOW_BITS < threshold]
        self._sampled_exact += sum(block not in self._exact for block in sampled)
        # A block that had to leave may have come back as an ancestor, and left again.
        gone = {block for block in self._exact.touch(leaf_to_root) if block not in self._exact}
        self._sampled_exact -= sum(block & _LOW_BITS < threshold for block in gone)
        self._sample.touch(sampled)

    def _in_sample(self, block: int) -> bool:
        return block & _LOW_BITS < self._threshold


def _count_depths(counts: HitCounts, depths: Sequence[float], weight: float) -> None:
    """Add depths, in ascending order, to the counts of the sizes that hold them."""
    done = 0
    while done < len(depths):
        size = bisect_left(SIZES, depths[done])
        end = bisect_right(depths, SIZES[size], done) if size < len(SIZES) else len(depths)
        counts.blocks[size] += weight * (end - done)
        done = end
