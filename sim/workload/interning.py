"""A workload's chains as one array of dense key numbers, for passes over all of them."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.kernels.interning import number_hashes
from sim.workload.chain import chain_places, is_private
from tracefile.records.arrays import IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class InternedChains:
    """Keys numbered 0 … ``distinct`` − 1; equal keys have equal numbers."""

    keys: Int32Array
    """Chain after chain, each at its place in ``starts``; between them −1."""
    distinct: int


def intern_chains(chains: Sequence[Sequence[int]], starts: IntArray, size: int) -> InternedChains:
    """Number the keys of ``chains`` and lay chain i out from ``starts[i]`` on in an array of ``size``.

    A chain's private keys are its last ones, and no other chain has them (see ``sim.workload.chain``): they are
    numbered by
    counting, the true hashes before them by their values.
    """
    known = np.array([bisect_left(chain, True, key=is_private) for chain in chains], np.int64)
    lengths = np.array([len(chain) for chain in chains], np.int64)
    numbered = _number(chain[:count] for chain, count in zip(chains, known, strict=True))
    return _laid_out(numbered, known, lengths, starts, size)


def lay_out_chains(
    hashes: npt.NDArray[np.uint64], known: IntArray, lengths: IntArray, starts: IntArray, size: int
) -> InternedChains:
    """The same of chains whose ``known`` first keys follow one another in ``hashes``; the others are private."""
    return _laid_out(_number_hashes(hashes), known, lengths, starts, size)


def _laid_out(
    numbered: tuple[Int32Array, int], known: IntArray, lengths: IntArray, starts: IntArray, size: int
) -> InternedChains:
    numbers, distinct = numbered
    keys = np.full(size, -1, np.int32)
    keys[chain_places(starts, known)] = numbers
    private = chain_places(starts + known, lengths - known)
    keys[private] = np.arange(distinct, distinct + len(private))
    return InternedChains(keys, distinct + len(private))


def _number(chains: Iterable[Sequence[int]]) -> tuple[Int32Array, int]:
    values = array("Q")
    chains = list(chains)
    try:
        for chain in chains:
            values.extend(chain)
    except OverflowError:  # hashes of a tool that counts below zero, or beyond 64 bits
        seen: dict[int, int] = {}
        numbers = [seen.setdefault(key, len(seen)) for chain in chains for key in chain]
        return np.array(numbers, np.int32), len(seen)
    return _number_hashes(np.frombuffer(values, np.uint64) if values else np.empty(0, np.uint64))


def _number_hashes(hashes: npt.NDArray[np.uint64]) -> tuple[Int32Array, int]:
    bits = max(2 * len(hashes), 2).bit_length()
    found = np.empty(len(hashes), np.int32)
    return found, number_hashes(hashes, np.zeros(1 << bits, np.int32), bits, found)
