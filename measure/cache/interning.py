"""Chains of block hashes as dense numbers, packed into runs."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from measure.cache.hashtable import HashTable
from measure.cache.vectors import array_of, integers
from tracefile.records.arrays import BoolArray, Int32Array, IntArray, UInt64Array

PRIVATE: Final = -1
"""Number of a block private to its request."""


class Interner:
    """Numbers of block hashes, 0, 1, 2 … by first occurrence; memory grows with the distinct hashes."""

    def __init__(self) -> None:
        self._table = HashTable()

    @property
    def distinct(self) -> int:
        return len(self._table.hashes)

    @property
    def hashes(self) -> UInt64Array:
        return array_of(self._table.hashes, np.uint64)

    def number(self, hashes: UInt64Array) -> Int32Array:
        """Return the number of each block hash; new hashes get the next numbers."""
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
    """Pack chains of ``counts`` block numbers into runs of consecutive numbers."""
    ends = np.cumsum(counts)
    is_run_start = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1] + 1, out=is_run_start[1:])
    is_run_start[(ends - counts)[counts > 0]] = True
    run_starts = np.flatnonzero(is_run_start)
    lengths = np.diff(run_starts, append=len(numbers)).astype(np.int32)
    return PackedChains(numbers[run_starts], lengths, np.diff(np.searchsorted(run_starts, np.append(0, ends))))


def join_chains(chains: Sequence[PackedChains]) -> PackedChains:
    """Concatenate packed chains, in order."""
    return PackedChains(*map(np.concatenate, zip(*chains, strict=True)))


def leading(starts: IntArray, counts: IntArray) -> BoolArray:
    """Return a mask of the first ``counts`` blocks of each chain; ``starts``: index of each chain, and the end."""
    return np.asarray(np.arange(starts[-1]) < np.repeat(starts[:-1] + counts, np.diff(starts)))


def unlimited_hits(keys: Int32Array, starts: IntArray, limits: IntArray, distinct: int) -> IntArray:
    """Return the prefix hit of each chain in an unlimited cache, at most ``limits`` keys."""
    first, chain_of = np.empty(distinct, np.int64), np.repeat(np.arange(len(limits)), np.diff(starts))
    first[keys[::-1]] = chain_of[::-1]  # the first chain wins: it is written last
    cached = (first[keys] < chain_of) & leading(starts, limits)
    # Only leading keys: hashes of other tools may not be chained.
    missed = np.append(0, np.cumsum(~cached))
    return np.bincount(chain_of[missed[1:] == missed[starts[chain_of]]], minlength=len(limits))
