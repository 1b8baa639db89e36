"""A workload's chains as one array of dense key numbers, for passes over all of them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry
from sim.workload.chain import chain_places
from tracefile.hashing.splitmix64 import GOLDEN
from tracefile.records.arrays import BoolArray, IntArray, UInt64Array

Int32Array = npt.NDArray[np.int32]
_GOLDEN = np.uint64(GOLDEN)
_ONE = np.uint64(1)


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
    bits = max(2 * len(hashes), 2).bit_length()
    numbers, keys = np.empty(len(hashes), np.int32), np.full(size, -1, np.int32)
    distinct = number_hashes(hashes, np.zeros(1 << bits, np.int32), bits, numbers)
    keys[chain_places(starts, known)] = numbers
    private = chain_places(starts + known, lengths - known)
    keys[private] = np.arange(distinct, distinct + len(private))
    return InternedChains(keys, distinct + len(private))


def leading(starts: IntArray, counts: IntArray) -> BoolArray:
    """True for the first ``counts`` keys of chains that lie one after another; ``starts`` has one more entry."""
    return np.asarray(np.arange(starts[-1]) < np.repeat(starts[:-1] + counts, np.diff(starts)))


def unlimited_hits(keys: IntArray | Int32Array, starts: IntArray, limits: IntArray, distinct: int) -> IntArray:
    """Count, chain by chain, the leading keys, of ``limits``, that are in an earlier chain: hits that none evicts."""
    first, chain_of = np.empty(distinct, np.int64), np.repeat(np.arange(len(limits)), np.diff(starts))
    first[keys[::-1]] = chain_of[::-1]  # the last one written stays
    seen = (first[keys] < chain_of) & leading(starts, limits)
    # Leading ones alone: ids of other tools need not be chained.
    missed = np.append(0, np.cumsum(~seen))
    return np.bincount(chain_of[missed[1:] == missed[starts[chain_of]]], minlength=len(limits))


@entry
def number_hashes(hashes: UInt64Array, slots: Int32Array, bits: int, numbers: Int32Array) -> int:
    """Number ``hashes`` 0, 1, 2 … as they first occur; return their count. ``slots``: 2**``bits`` zeros."""
    mask, shift, distinct = np.uint64(len(slots) - 1), np.uint64(64 - bits), 0
    for position in range(len(hashes)):
        slot = (hashes[position] * _GOLDEN) >> shift
        while slots[slot] != 0 and hashes[slots[slot] - 1] != hashes[position]:
            slot = (slot + _ONE) & mask
        if slots[slot] == 0:
            slots[slot] = position + 1
            numbers[position] = distinct
            distinct += 1
        else:
            numbers[position] = numbers[slots[slot] - 1]
    return distinct
