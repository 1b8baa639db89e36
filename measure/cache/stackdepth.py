"""LRU stack depths of prefix blocks. mypyc compiles this module; it runs uncompiled, too.

The last touch of a block is a bit at its index in time, so the depth of a block is one more than the number of bits
after its bit. Words of 32 bits are under a Fenwick tree of bit counts, small enough for the L1 cache. Consecutively
touched blocks have depths that differ by one, so a repeated prompt costs one query, not one per block.
"""

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec, repeated_byte


class LruStack:
    """LRU order of blocks, for up to ``accesses`` touches of blocks with numbers below ``numbers``.

    Blocks with the number −1 are private and never touched again.
    """

    def __init__(self, accesses: i64, numbers: i64) -> None:
        self.touched_at: vec[i64] = repeated_byte(b"\xff", numbers)
        """Index in time of each block's last touch; −1: never."""
        self._bits: vec[i64] = repeated_byte(b"\0", (accesses >> 5) + 1)
        """Bits at the indices of the last touches."""
        self._tree: vec[i64] = repeated_byte(b"\0", (accesses >> 5) + 2)
        """A Fenwick tree of the number of bits in each word."""
        self._now: i64 = 0
        self._touched: i64 = 0
        """Number of distinct touched blocks."""

    def count_depths(self, piece: tuple[BoxedVec, BoxedVec, BoxedVec], boxed_counts: tuple[BoxedVec, BoxedVec]) -> None:
        """Count prefix hits by the smallest cache size with the hit, and requests by hits in an unlimited cache.

        Request i has ``blocks[starts[i]]`` to ``blocks[starts[i + 1]]``; at most ``limits[i]`` may hit. ``depths[d]``
        counts blocks whose running maximum of depths is d: hits of every cache of d blocks or more. ``requests[h]``
        counts requests with h hits. ``piece``: ``blocks``, ``starts``, ``limits``; ``boxed_counts``: ``depths``,
        ``requests``.
        """
        blocks: vec[i64] = piece[0]
        starts: vec[i64] = piece[1]
        limits: vec[i64] = piece[2]
        depths: vec[i64] = boxed_counts[0]
        requests: vec[i64] = boxed_counts[1]
        for request in range(i64(len(limits))):
            first = starts[request]
            end = starts[request + 1]
            deepest: i64 = 0
            depth: i64 = 0
            expected: i64 = -2  # last touch of the next block, if it directly preceded the last touch of this block
            hits: i64 = 0
            for index in range(first, min(end, first + limits[request])):
                touched_at = self._last_touch(blocks[index])
                if touched_at < 0:
                    break
                hits += 1
                depth = depth + 1 if touched_at == expected else self._depth(touched_at)
                expected = touched_at - 1
                deepest = max(deepest, depth)
                depths[deepest] += 1
            requests[hits] += 1
            self._touch(blocks, first, end)

    def access_depths(self, boxed_blocks: BoxedVec, boxed_starts: BoxedVec) -> tuple[vec[i64], vec[i64]]:
        """Return the LRU depth and the last touch of each accessed block; 0 and −1: never touched before."""
        blocks: vec[i64] = boxed_blocks
        starts: vec[i64] = boxed_starts
        depths, touches = repeated_byte(b"\0", len(blocks)), repeated_byte(b"\xff", len(blocks))
        for request in range(i64(len(starts) - 1)):
            first = starts[request]
            end = starts[request + 1]
            depth: i64 = 0
            expected: i64 = -2
            for index in range(first, end):
                touched_at = self._last_touch(blocks[index])
                if touched_at >= 0:
                    depth = depth + 1 if touched_at == expected else self._depth(touched_at)
                    expected = touched_at - 1
                    depths[index] = depth
                    touches[index] = touched_at
            self._touch(blocks, first, end)
        return depths, touches

    def _last_touch(self, block: i64) -> i64:
        return self.touched_at[block] if block >= 0 else -1

    def _depth(self, touched_at: i64) -> i64:
        """Return the LRU depth of a block: one more than the number of blocks touched since ``touched_at``."""
        word = touched_at >> 5
        until: i64 = count_bits(self._bits[word] & ((i64(2) << (touched_at & 31)) - 1))
        tree = self._tree
        while word > 0:
            until += tree[word]
            word &= word - 1
        return self._touched - until + 1

    def _touch(self, blocks: vec[i64], first: i64, end: i64) -> None:
        """Touch the blocks of a request from leaf to root."""
        bits = self._bits
        last_touches = self.touched_at
        now = self._now
        old_word: i64 = 0
        new_word = now >> 5
        cleared: i64 = 0
        added: i64 = 0
        for index in range(end - 1, first - 1, -1):
            block = blocks[index]
            touched_at: i64 = last_touches[block] if block >= 0 else -1
            if touched_at < 0:
                self._touched += 1
            else:
                if touched_at >> 5 != old_word:
                    self._add(old_word, -cleared)
                    old_word = touched_at >> 5
                    cleared = 0
                bits[old_word] ^= i64(1) << (touched_at & 31)
                cleared += 1
            if now >> 5 != new_word:
                self._add(new_word, added)
                new_word = now >> 5
                added = 0
            bits[new_word] |= i64(1) << (now & 31)
            added += 1
            if block >= 0:
                last_touches[block] = now
            now += 1
        self._now = now
        self._add(old_word, -cleared)
        self._add(new_word, added)

    def _add(self, word: i64, change: i64) -> None:
        """Add ``change`` bits to the count of ``word``."""
        tree = self._tree
        size: i64 = len(tree) if change != 0 else 0
        node = word + 1
        while node < size:
            tree[node] += change
            node += node & -node


def count_bits(word: i64) -> i64:
    """Return the number of set bits of a 32-bit word."""
    word -= (word >> 1) & 0x5555_5555
    word = (word & 0x3333_3333) + ((word >> 2) & 0x3333_3333)
    word = (word + (word >> 4)) & 0x0F0F_0F0F
    return (word * 0x0101_0101 >> 24) & 0xFF
