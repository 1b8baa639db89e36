"""An LRU order over endless accesses: how deep a key lies, in memory that follows the keys kept and not the trace.

A key's last touch is a bit at its place in time, as in ``measure.stackdepth``; here keys are hashes, found by open
addressing, and when time has run out of places, the kept keys are set anew at its beginning.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from measure.stackdepth import add_bits, bits_up_to
from tracefile.hashing.splitmix64 import mix64
from tracefile.records.arrays import IntArray, UInt64Array

FIRST_PLACES = 1 << 12
mixed = numba.njit(mix64)


class RecencyStack(NamedTuple):
    """Arrays behind one order; replaced as a whole by ``with_room``."""

    keys: UInt64Array
    """Table: key by slot; a power of two of them, four times as many as places."""
    touched_at: IntArray
    """Beside it: the place of the key's last touch; −1: a free slot."""
    bits: UInt64Array
    """By place in time, packed: whether some key was touched there last."""
    tree: npt.NDArray[np.int32]
    """Fenwick tree over the words of ``bits``."""
    state: IntArray
    """The next place in time, how many places there are, and how many keys are in the order."""


def empty_stack(places: int = FIRST_PLACES) -> RecencyStack:
    """An order without keys, with room for so many touches or a few more."""
    places = 1 << max(places - 1, 63).bit_length()
    words = places >> 6
    return RecencyStack(
        np.zeros(4 * places, np.uint64),
        np.full(4 * places, -1, np.int64),
        np.zeros(words, np.uint64),
        np.zeros(words + 1, np.int32),
        np.array([0, places, 0], np.int64),
    )


def with_room(stack: RecencyStack, touches: int, most: int | None = None) -> RecencyStack:
    """The same order with room for ``touches`` more, of at most the ``most`` keys touched last."""
    held = np.flatnonzero(stack.touched_at >= 0)
    kept = stack.keys[held[np.argsort(stack.touched_at[held])]]
    if most is not None:
        kept = kept[max(len(kept) - most, 0) :]
    fresh = empty_stack(max(2 * len(kept), len(kept) + touches, FIRST_PLACES))
    for_all(fresh, kept)
    return fresh


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def for_all(stack: RecencyStack, keys: UInt64Array) -> None:  # pragma: no cover - compiled
    """Touch ``keys`` in turn."""
    for key in keys:
        touch(stack, key)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def slot_of(stack: RecencyStack, key: np.uint64) -> np.int64:  # pragma: no cover - compiled
    """Where in the table ``key`` is, or would be."""
    mask = np.int64(len(stack.keys) - 1)
    slot = np.int64(mixed(key) >> np.uint64(1)) & mask
    while stack.touched_at[slot] >= 0 and stack.keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def depth_of(stack: RecencyStack, key: np.uint64) -> np.int64:  # pragma: no cover - compiled
    """1 for the key touched last, and so on; 0 for one that is not in the order."""
    at = stack.touched_at[slot_of(stack, key)]
    return np.int64(0) if at < 0 else stack.state[2] - bits_up_to(stack.tree, stack.bits, at) + 1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def touch(stack: RecencyStack, key: np.uint64) -> None:  # pragma: no cover - compiled
    """Make ``key`` the one touched last. There is room for it: the caller has checked the state."""
    slot = slot_of(stack, key)
    at, now = stack.touched_at[slot], stack.state[0]
    if at >= 0:
        stack.bits[at >> 6] &= ~(np.uint64(1) << np.uint64(at & 63))
        add_bits(stack.tree, at >> 6, -1)
    else:
        stack.keys[slot] = key
        stack.state[2] += 1
    stack.bits[now >> 6] |= np.uint64(1) << np.uint64(now & 63)
    add_bits(stack.tree, now >> 6, 1)
    stack.touched_at[slot] = now
    stack.state[0] = now + 1
