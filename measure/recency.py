"""Blocks in the order of their last touch, bounded, with each block's place in it at hand: an LRU stack with depths.

Each touch takes the next slot of a byte map; a block's depth is the number of slots taken after its own. Slots are
counted by stretch, so a depth costs a sum over stretches and one count within a stretch, both in C, and a touch costs
two increments: with a few hundred stretches that beats a tree. When the slots run out, the living ones move together.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

STRETCH: Final = 1024
"""Slots counted together."""
SLACK: Final = 4
"""Slots per block that may be held: so often is everything moved together, once in (SLACK − 1) × capacity touches."""


class RecencyStack:
    """At most ``capacity`` blocks; the one touched longest ago leaves first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        slots = -(-SLACK * max(capacity, 1) // STRETCH) * STRETCH
        self._slot_of: dict[int, int] = {}
        self._block_at = array("Q", bytes(8 * slots))
        self._taken = bytearray(slots)
        self._by_stretch = [0] * (slots // STRETCH)
        self._next = 0
        self._oldest = 0
        """No slot before it is taken."""

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slot_of)

    def __contains__(self, block: int) -> bool:
        return block in self._slot_of

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """The place of each leading block that is held, 1 for the one touched last; ends at the first that is not.

        Blocks that were touched one after the other in reverse lie side by side: each is one deeper than the last.
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
        """Touch the blocks in this order, the last one being the one touched last; returns those that had to leave."""
        evicted: list[int] = []
        slot_of, block_at, taken, by_stretch = self._slot_of, self._block_at, self._taken, self._by_stretch
        for block in blocks:
            slot = slot_of.get(block)
            if slot is not None:
                taken[slot] = 0
                by_stretch[slot // STRETCH] -= 1
            if self._next == len(taken):
                self._move_together()
            slot_of[block] = slot = self._next
            block_at[slot] = block
            taken[slot] = 1
            by_stretch[slot // STRETCH] += 1
            self._next = slot + 1
            if len(slot_of) > self.capacity:
                evicted.append(self._evict())
        return evicted

    def check_integrity(self) -> None:
        """Raise AssertionError if the map, the slots and the counts disagree."""
        taken = [slot for slot, mark in enumerate(self._taken) if mark]
        assert taken == sorted(self._slot_of.values())
        assert all(self._slot_of[self._block_at[slot]] == slot for slot in taken)
        assert sum(self._by_stretch) == len(taken)
        for number, count in enumerate(self._by_stretch):
            assert count == sum(self._taken[number * STRETCH : (number + 1) * STRETCH])
        assert not any(self._taken[: self._oldest])

    def _depth_of_slot(self, slot: int) -> int:
        stretch = slot // STRETCH
        end = (stretch + 1) * STRETCH
        last = self._next // STRETCH + 1
        return self._taken.count(1, slot, end) + sum(self._by_stretch[stretch + 1 : last])

    def _evict(self) -> int:
        slot = self._taken.find(1, self._oldest)
        block = self._block_at[slot]
        self._oldest = slot + 1
        self._taken[slot] = 0
        self._by_stretch[slot // STRETCH] -= 1
        del self._slot_of[block]
        return block

    def _move_together(self) -> None:
        """Give the blocks the lowest slots, in their order."""
        block_at, taken = self._block_at, self._taken
        living = [block_at[slot] for slot in range(self._next) if taken[slot]]
        count = len(living)
        self._slot_of.update(zip(living, range(count), strict=True))
        block_at[:count] = array("Q", living)
        taken[:] = b"\1" * count + bytes(len(taken) - count)
        self._by_stretch[:] = [min(STRETCH, max(0, count - start)) for start in range(0, len(taken), STRETCH)]
        self._next, self._oldest = count, 0
