"""Block hashes as dense numbers. mypyc compiles this module; it runs uncompiled, too."""

from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i64

BoxedVec = Any
"""A vec passed from Python. mypyc loses a reference to a vec that it unboxes for a call, and leaks its memory."""


def repeated_byte(byte: bytes, count: i64) -> vec[i64]:
    """Return ``count`` numbers whose eight bytes are all ``byte``."""
    return vec[i64](memoryview(byte * (8 * count)).cast("q"))


class HashTable:
    """Numbers of block hashes, 0, 1, 2 … by first occurrence; memory grows with the distinct hashes."""

    def __init__(self) -> None:
        self.hashes: vec[i64] = vec[i64]()
        """Hash by number."""
        self._slots: vec[i64] = repeated_byte(b"\0", 2)
        """Open addressing: number + 1 by slot; 0: free. The number of slots is a power of two."""
        self._shift: i64 = 31

    def number(self, boxed_hashes: BoxedVec) -> vec[i64]:
        """Return the number of each block hash; new hashes get the next numbers."""
        hashes: vec[i64] = boxed_hashes
        numbers = repeated_byte(b"\0", len(hashes))
        number: i64 = -1
        for index in range(i64(len(hashes))):
            number += 1  # of the next block in a chain
            if number >= len(self.hashes) or self.hashes[number] != hashes[index]:
                number = self._number_of(hashes[index])
            numbers[index] = number
        return numbers

    def _number_of(self, key: i64) -> i64:
        slot = self._slot_of(key)
        if self._slots[slot] == 0:
            self.hashes = append(self.hashes, key)
            self._slots[slot] = len(self.hashes)
            if 2 * len(self.hashes) > len(self._slots):
                self._grow()
            return len(self.hashes) - 1
        return self._slots[slot] - 1

    def _slot_of(self, key: i64) -> i64:
        """Return the slot of a hash, or the free slot for it."""
        slots = self._slots
        mask: i64 = len(slots) - 1
        folded: i64 = (key ^ (key >> 32)) & 0xFFFF_FFFF
        slot: i64 = ((folded * 0x4F1B_BCDD) & 0xFFFF_FFFF) >> self._shift  # Fibonacci hashing, in 63 bits
        while slots[slot] != 0 and self.hashes[slots[slot] - 1] != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        self._slots = repeated_byte(b"\0", 4 * len(self._slots))
        self._shift -= 2
        for number in range(i64(len(self.hashes))):
            self._slots[self._slot_of(self.hashes[number])] = number + 1
