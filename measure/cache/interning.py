"""Chains of block hashes as dense numbers, for passes over all of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from measure.cache.chains import Int32Array, chain_places
from measure.cache.machinecode import kept
from tracefile.hashing.splitmix64 import GOLDEN
from tracefile.records.arrays import BoolArray, IntArray, UInt64Array

_GOLDEN = np.uint64(GOLDEN)
_ONE = np.uint64(1)


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
        self._make_room(len(hashes))
        numbers = np.empty(len(hashes), np.int32)
        self.distinct = number_hashes(hashes, self._keys, self._slots, self.distinct, numbers)
        return numbers

    def _make_room(self, new: int) -> None:
        most = self.distinct + new
        if 2 * most <= len(self._slots):
            return
        old = self.hashes
        self._slots = np.zeros(1 << (2 * most).bit_length(), np.int32)
        self._keys = np.empty(len(self._slots) // 2, np.uint64)
        number_hashes(old, self._keys, self._slots, 0, np.empty(len(old), np.int32))


class NumberedChains(NamedTuple):
    """Chains of numbers below ``distinct``."""

    numbers: Int32Array
    firsts: IntArray
    """Place of each chain's first number."""
    distinct: int
    every: int = 1
    """Numbers to a key, the last of which is the key's: the chain in blocks so many times as large."""


@dataclass(frozen=True, slots=True)
class InternedChains:
    """Keys numbered 0 … ``distinct`` − 1; equal keys have equal numbers."""

    keys: Int32Array
    """Chain after chain, each at its place in ``starts``; between them −1."""
    distinct: int


def lay_out_chains(
    hashes: UInt64Array, known: IntArray, lengths: IntArray, starts: IntArray, size: int
) -> InternedChains:
    """Number the keys of chains, and lay chain i out from ``starts[i]`` on in an array of ``size``.

    The ``known`` first keys of the chains follow one another in ``hashes``; the others are private, and differ.
    """
    interner = Interner()
    chains = NumberedChains(interner.number(hashes), np.cumsum(known) - known, interner.distinct)
    return lay_out_numbers(chains, known, lengths, starts, size)


def lay_out_numbers(
    chains: NumberedChains, known: IntArray, lengths: IntArray, starts: IntArray, size: int
) -> InternedChains:
    """Lay chains that have numbers already out as ``lay_out_chains`` does."""
    keys, distinct = np.full(size, -1, np.int32), chains.distinct
    copy_chains(chains, known, keys, starts)
    private = chain_places(starts + known, lengths - known)
    keys[private] = np.arange(distinct, distinct + len(private))
    return InternedChains(keys, distinct + len(private))


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


@kept
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


@kept
def copy_chains(
    chains: NumberedChains, counts: IntArray, into: Int32Array, starts: IntArray
) -> None:  # pragma: no cover - compiled
    """Copy the numbers of ``counts[i]`` leading keys of chain i to ``starts[i]`` and after."""
    for chain in range(len(counts)):
        first = chains.firsts[chain] + chains.every - 1
        for place in range(counts[chain]):
            into[starts[chain] + place] = chains.numbers[first + chains.every * place]
