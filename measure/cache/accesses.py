"""Requests as flat arrays of block numbers in order of arrival, for the passes that touch each block in turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from measure.cache.chains import chain_places
from measure.cache.interning import PRIVATE, PackedChains, leading
from tracefile.records.arrays import FloatArray, IntArray

MOST_BLOCKS: Final = 1 << 20
"""Blocks of a piece, unless one request has more."""


class Piece(NamedTuple):
    """Successive requests."""

    first: int
    """Number of the first request."""
    blocks: IntArray
    """Numbers of their blocks, root to leaf, or PRIVATE."""
    starts: IntArray
    """Place of each one's first in ``blocks``, and the end."""


@dataclass(frozen=True, slots=True)
class Accesses:
    """Requests one after another, each with its full blocks, root to leaf: its prompt's, then its output's."""

    chains: PackedChains
    """Known blocks as numbers, in the trace's order."""
    order: IntArray
    """Chain of each request."""
    known: IntArray
    """Leading blocks of each request that have a number; the others are private: nothing else has them."""
    starts: IntArray
    """Place of each request's first block among all; one more entry than requests."""
    limits: IntArray
    """How many leading blocks each request may hit."""
    numbers: int
    """Numbers lie below."""
    block_size: int
    prompt_tokens: IntArray
    arrival_ms: FloatArray
    """NaN: not recorded."""
    fine_block_size: int | None = None
    """The trace's block size. Null: ``block_size``."""
    whole_chains: int = 0
    """Requests whose filled blocks are all known, outputs' included."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the requests in order, so many at a time that their blocks fit in little memory."""
        begins, first = self._begins(), 0
        while first < len(self.limits):
            end = int(np.searchsorted(self.starts, self.starts[first] + MOST_BLOCKS, side="right")) - 1
            end = min(max(end, first + 1), len(self.limits))
            yield self._piece(begins, first, end)
            first = end

    def _begins(self) -> IntArray:
        return np.append(0, np.cumsum(self.chains.runs))

    def _piece(self, begins: IntArray, first: int, end: int) -> Piece:
        starts, order = self.starts[first : end + 1] - self.starts[first], self.order[first:end]
        runs = chain_places(begins[order], self.chains.runs[order])
        blocks = np.full(int(starts[-1]), PRIVATE)
        numbers = chain_places(self.chains.firsts[runs].astype(np.int64), self.chains.lengths[runs].astype(np.int64))
        blocks[leading(starts, self.known[first:end])] = numbers
        return Piece(first, blocks, starts)

    @property
    def distinct(self) -> int:
        """Return the number of different blocks, private ones included."""
        return self.numbers + int(self.starts[-1] - self.known.sum())

    @property
    def blocks(self) -> IntArray:
        """All blocks as dense numbers 0 … distinct − 1."""
        blocks = self._piece(self._begins(), 0, len(self.limits)).blocks
        private = blocks == PRIVATE
        blocks[private] = np.arange(self.numbers, self.numbers + int(private.sum()))
        return blocks

    @property
    def input_tokens(self) -> int:
        return int(self.prompt_tokens.sum())

    @property
    def lookup_blocks(self) -> IntArray:
        """Full prompt blocks of each request, the first of its blocks."""
        return self.prompt_tokens // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChains:
    """Requests of a trace, in its order, with the numbers of the blocks whose hashes it knows."""

    chains: PackedChains
    numbers: int
    """Numbers lie below."""
    known: IntArray
    """Leading full blocks, of ``block_size``, that are known: the numbers of each chain."""
    prompt_tokens: IntArray
    """1 or more."""
    prompt_logprobs: IntArray
    """1: log probabilities of the prompt were asked for, so that it is not looked up; 0: it is."""
    arrival_ms: FloatArray
    block_size: int
    fine_block_size: int
    """The trace's."""
    whole_chains: int

    @property
    def order(self) -> IntArray:
        return arrival_order(self.arrival_ms)


def arrival_order(arrival_ms: FloatArray) -> IntArray:
    """Return requests by arrival; as they are if a time is missing."""
    timed = not np.isnan(arrival_ms).any()
    return np.argsort(arrival_ms, kind="stable") if timed else np.arange(len(arrival_ms))


def lay_out_accesses(chains: KnownChains) -> Accesses:
    """Return the requests in order of arrival; prompt blocks that are not known are private."""
    order = chains.order
    known, tokens = chains.known[order], chains.prompt_tokens[order]
    blocks = np.maximum(tokens // chains.block_size, known)
    return Accesses(
        chains=chains.chains,
        order=order,
        known=known,
        starts=np.concatenate([[0], np.cumsum(blocks)]),
        limits=(tokens - 1) // chains.block_size * (1 - chains.prompt_logprobs[order]),
        numbers=chains.numbers,
        block_size=chains.block_size,
        prompt_tokens=tokens,
        arrival_ms=chains.arrival_ms[order],
        fine_block_size=chains.fine_block_size,
        whole_chains=chains.whole_chains,
    )
