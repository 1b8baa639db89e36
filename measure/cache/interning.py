"""Chains of block hashes as dense numbers, for passes over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from measure.machinecode.entries import entry
from tracefile.hashing.splitmix64 import GOLDEN
from tracefile.records.arrays import BoolArray, Int32Array, IntArray, UInt64Array

_GOLDEN = np.uint64(GOLDEN)
_ONE = np.uint64(1)
PIECE: Final = 1 << 18
"""Hashes that a table makes room for at a time."""
PRIVATE: Final = -1
"""Number of a block that nothing else has."""


@dataclass(slots=True)
class Interner:
    """Numbers of hashes, 0, 1, 2 … as they first occur; memory follows the distinct ones."""

    distinct: int = 0
    _keys: UInt64Array = field(default_factory=lambda: np.empty(1, np.uint64))
    """By number: the hash."""
    _slots: Int32Array = field(default_factory=lambda: np.zeros(2, np.int32))
    """Table of numbers + 1; 0: free. A power of two of them, at least twice as many as hashes."""

    @property
    def hashes(self) -> UInt64Array:
        return self._keys[: self.distinct]

    def number(self, hashes: UInt64Array) -> Int32Array:
        """Return the number of each hash; new ones get the next numbers."""
        numbers = np.empty(len(hashes), np.int32)
        for start in range(0, len(hashes), PIECE):  # all might be new, but few are
            piece = hashes[start : start + PIECE]
            self._make_room(len(piece))
            into = numbers[start : start + PIECE]
            self.distinct = number_hashes(piece, self._keys, self._slots, self.distinct, into)
        return numbers

    def _make_room(self, new: int) -> None:
        most = self.distinct + new
        if 2 * most <= len(self._slots):
            return
        old = self.hashes
        self._slots = np.zeros(1 << (2 * most).bit_length(), np.int32)
        self._keys = np.empty(len(self._slots) // 2, np.uint64)
        number_hashes(old, self._keys, self._slots, 0, np.empty(len(old), np.int32))


class PackedChains(NamedTuple):
    """Chains of numbers as runs, each one more than the number before: a chain that shares its beginning has few."""

    firsts: Int32Array
    """First number of each run, chain after chain."""
    lengths: Int32Array
    runs: IntArray
    """Runs of each chain."""


def pack_chains(numbers: Int32Array, counts: IntArray) -> PackedChains:
    """Pack chains of ``counts`` numbers, one after another."""
    ends = np.cumsum(counts)
    begins = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1] + 1, out=begins[1:])
    begins[(ends - counts)[counts > 0]] = True
    places = np.flatnonzero(begins)
    lengths = np.diff(places, append=len(numbers)).astype(np.int32)
    return PackedChains(numbers[places], lengths, np.diff(np.searchsorted(places, np.append(0, ends))))


def join_chains(parts: Sequence[PackedChains]) -> PackedChains:
    """Return the chains of all parts, in order."""
    return PackedChains(*map(np.concatenate, zip(*parts, strict=True)))


def leading(starts: IntArray, counts: IntArray) -> BoolArray:
    """True for the first ``counts`` keys of chains that lie one after another; ``starts`` has one more entry."""
    return np.asarray(np.arange(starts[-1]) < np.repeat(starts[:-1] + counts, np.diff(starts)))


def unlimited_hits(keys: Int32Array, starts: IntArray, limits: IntArray, distinct: int) -> IntArray:
    """Count, chain by chain, the leading keys, of ``limits``, that are in an earlier chain: hits that none evicts."""
    first, chain_of = np.empty(distinct, np.int64), np.repeat(np.arange(len(limits)), np.diff(starts))
    first[keys[::-1]] = chain_of[::-1]  # the last one written stays
    seen = (first[keys] < chain_of) & leading(starts, limits)
    # Leading ones alone: ids of other tools need not be chained.
    missed = np.append(0, np.cumsum(~seen))
    return np.bincount(chain_of[missed[1:] == missed[starts[chain_of]]], minlength=len(limits))


@entry
def number_hashes(
    hashes: UInt64Array, keys: UInt64Array, slots: Int32Array, distinct: int, numbers: Int32Array
) -> int:  # pragma: no cover - compiled
    """Number ``hashes``, new ones from ``distinct`` on; return how many numbers there are then."""
    mask, shift, size = np.uint64(len(slots) - 1), np.uint64(64), len(slots)
    while size > 1:
        shift -= _ONE
        size >>= 1
    for position in range(len(hashes)):
        slot = (hashes[position] * _GOLDEN) >> shift
        while slots[slot] != 0 and keys[slots[slot] - 1] != hashes[position]:
            slot = (slot + _ONE) & mask
        if slots[slot] == 0:
            keys[distinct] = hashes[position]
            distinct += 1
            slots[slot] = distinct
        numbers[position] = slots[slot] - 1
    return distinct


@entry
def lay_out_chains(
    chains: PackedChains, begins: IntArray, order: IntArray, starts: IntArray, blocks: Int32Array
) -> None:  # pragma: no cover - compiled
    """Lay chain ``order[i]`` out from ``starts[i]`` on, and PRIVATE from its end to ``starts[i + 1]``.

    ``begins``: place of each chain's first run, and the end.
    """
    firsts, lengths = chains.firsts, chains.lengths
    for request in range(len(order)):
        place = starts[request]
        for run in range(begins[order[request]], begins[order[request] + 1]):
            for number in range(firsts[run], firsts[run] + lengths[run]):
                blocks[place] = number
                place += 1
        blocks[place : starts[request + 1]] = PRIVATE
