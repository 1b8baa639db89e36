"""Chains of block hashes as dense numbers, for passes over all of them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from measure.cache.hashtable import HashTable
from measure.cache.vectors import array_of, integers
from tracefile.records.arrays import BoolArray, Int32Array, IntArray, UInt64Array

PRIVATE: Final = -1
"""Number of a block that nothing else has."""


class Interner:
    """Numbers of hashes, 0, 1, 2 … as they first occur; memory follows the distinct ones."""

    def __init__(self) -> None:
        self._table = HashTable()

    @property
    def distinct(self) -> int:
        return len(self._table.hashes)

    @property
    def hashes(self) -> UInt64Array:
        return array_of(self._table.hashes, np.uint64)

    def number(self, hashes: UInt64Array) -> Int32Array:
        """Return the number of each hash; new ones get the next numbers."""
        numbers: Int32Array = array_of(self._table.number(integers(hashes)), np.int64).astype(np.int32)
        return numbers


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
