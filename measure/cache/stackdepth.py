"""LRU stack depths of prefix blocks, compiled.

The last touch of a block is a bit at its place in time, so its depth is one more than the number of bits after it. The
bits are packed 64 to a word under a Fenwick tree of word counts, small enough for the nearest cache. Blocks touched in
succession have depths one apart, so a prompt that was seen whole costs one query, not one per block.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from measure.cache.accesses import Piece
from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel
from tracefile.records.arrays import BoolArray, Int32Array, IntArray


class Recency(NamedTuple):
    """LRU order of all blocks, from one piece of the requests to the next."""

    touched_at: IntArray
    """Place of each block's last touch; −1: never."""
    bits: npt.NDArray[np.uint64]
    """Bits at these places."""
    tree: npt.NDArray[np.int32]
    """A Fenwick tree of how many of them each word holds."""
    state: IntArray
    """The next place in time, and how many blocks were touched."""


def untouched(accesses: int, numbers: int) -> Recency:
    """Return the order before the first of so many touches of blocks with ``numbers``, and of private ones."""
    words = (accesses >> 6) + 1
    return Recency(
        np.full(numbers, -1, np.int64),
        np.zeros(words, np.uint64),
        np.zeros(words + 1, np.int32),
        np.zeros(2, np.int64),
    )


@entry
def count_depths(
    recency: Recency, piece: Piece, limits: IntArray, depths: IntArray, requests: IntArray
) -> None:  # pragma: no cover - compiled
    """Count the leading blocks that hit from each cache size on, and the requests by hits in an unlimited cache.

    ``limits``: of all requests, the leading blocks that each may hit. ``depths`` counts at d the blocks whose running
    maximum of depths is d, which hit in every cache of d blocks or more; ``requests`` at h those with h hits.
    """
    before, blocks, starts = piece.first, piece.blocks, piece.starts
    touched_at = recency.touched_at
    for request in range(len(starts) - 1):
        first, end = starts[request], starts[request + 1]
        deepest = 0
        depth = 0
        expected = -2  # where the next block was touched if it came just before this one's touch
        hits = 0
        for position in range(first, min(end, first + limits[before + request])):
            block = blocks[position]
            at = touched_at[block] if block >= 0 else -1
            if at < 0:
                break
            hits += 1
            depth = _depth(recency, at, expected, depth)
            expected = at - 1
            deepest = max(deepest, depth)
            depths[deepest] += 1
        requests[hits] += 1
        _touch(recency, blocks[first:end])


class AccessDepths(NamedTuple):
    """Accesses of a piece."""

    depths: IntArray
    """0: never touched before."""
    before: IntArray
    """Request that touched the block before; −1: none."""
    repeated: BoolArray
    """True: the same request has named the block already."""


def access_depths(recency: Recency, touched_by: IntArray, piece: Piece) -> AccessDepths:
    """Return the depths of a piece's accesses; ``touched_by``: by block, the request that touched it last, else −1."""
    count = len(piece.blocks)
    found = AccessDepths(np.zeros(count, np.int64), np.full(count, -1, np.int64), np.zeros(count, np.bool_))
    _find_depths(recency, touched_by, piece, found)
    return found


@entry
def _find_depths(
    recency: Recency, touched_by: IntArray, piece: Piece, found: AccessDepths
) -> None:  # pragma: no cover - compiled
    first_request, blocks, starts = piece.first, piece.blocks, piece.starts
    touched_at, depths, before, repeated = recency.touched_at, found.depths, found.before, found.repeated
    for request in range(len(starts) - 1):
        first, end = starts[request], starts[request + 1]
        depth = 0
        expected = -2
        for position in range(first, end):
            block = blocks[position]
            at = touched_at[block] if block >= 0 else -1
            if at < 0:
                continue
            depth = _depth(recency, at, expected, depth)
            expected = at - 1
            depths[position] = depth
            before[position] = touched_by[block]
        _touch(recency, blocks[first:end])
        for position in range(first, end):
            block = blocks[position]
            if block >= 0:
                repeated[position] = touched_by[block] == first_request + request
                touched_by[block] = first_request + request


@kernel
def _depth(recency: Recency, at: int, expected: int, before: int) -> int:  # pragma: no cover - compiled
    """Return the depth of the block touched at ``at``: ``before`` + 1 if that is ``expected``."""
    return before + 1 if at == expected else recency.state[1] - bits_up_to(recency.tree, recency.bits, at) + 1


@kernel
def _touch(recency: Recency, blocks: Int32Array) -> None:  # pragma: no cover - compiled
    """Touch ``blocks`` from leaf to root."""
    touched_at, bits, tree, state = recency.touched_at, recency.bits, recency.tree, recency.state
    now = state[0]
    old_word, new_word, cleared, added = 0, now >> 6, 0, 0
    for block in blocks[::-1]:
        at = touched_at[block] if block >= 0 else -1
        if at < 0:
            state[1] += 1
        else:
            if at >> 6 != old_word:
                add_bits(tree, old_word, -cleared)
                old_word, cleared = at >> 6, 0
            bits[old_word] &= ~(np.uint64(1) << np.uint64(at & 63))
            cleared += 1
        if now >> 6 != new_word:
            add_bits(tree, new_word, added)
            new_word, added = now >> 6, 0
        bits[new_word] |= np.uint64(1) << np.uint64(now & 63)
        added += 1
        if block >= 0:
            touched_at[block] = now
        now += 1
    state[0] = now
    add_bits(tree, old_word, -cleared)
    add_bits(tree, new_word, added)


@kernel
def add_bits(tree: npt.NDArray[np.int32], word: int, change: int) -> None:  # pragma: no cover - compiled
    """Add ``change`` bits to the count of ``word``."""
    if change == 0:
        return
    node = word + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@kernel
def bits_up_to(
    tree: npt.NDArray[np.int32], bits: npt.NDArray[np.uint64], at: int
) -> int:  # pragma: no cover - compiled
    """Return the number of bits set up to and including ``at``."""
    word = at >> 6
    total = 0
    node = word
    while node > 0:
        total += int(tree[node])
        node -= node & -node
    rest = bits[word] & (~np.uint64(0) >> np.uint64(63 - (at & 63)))
    while rest:
        rest &= rest - np.uint64(1)
        total += 1
    return total
