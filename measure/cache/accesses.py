"""Block accesses of requests as flat arrays in order of arrival, for passes over all blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from measure.cache.chains import chain_indices
from measure.cache.interning import PRIVATE, PackedChains, leading
from tracefile.records.arrays import FloatArray, IntArray

MOST_BLOCKS: Final = 1 << 20
"""Most blocks of a piece, unless one request has more."""


class Piece(NamedTuple):
    """Blocks of consecutive requests."""

    first: int
    """Number of the first request."""
    blocks: IntArray
    """Block numbers, root to leaf, or PRIVATE."""
    starts: IntArray
    """Index of each request's first block in ``blocks``, and the end."""


@dataclass(frozen=True, slots=True)
class Accesses:
    """Full blocks of requests in order of arrival, root to leaf: prompt blocks, then output blocks."""

    chains: PackedChains
    """Hashed blocks as numbers, in the trace's order."""
    order: IntArray
    """Chain of each request."""
    hashed_blocks: IntArray
    """Leading hashed blocks of each request; later blocks are private to the request."""
    starts: IntArray
    """Index of each request's first block among all blocks, and the end."""
    limits: IntArray
    """Limit of each request's prefix hit, in blocks."""
    numbers: int
    """Upper bound of the block numbers, exclusive."""
    block_size: int
    prompt_tokens: IntArray
    arrival_ms: FloatArray
    """NaN: not recorded."""
    fine_block_size: int | None = None
    """The trace's block size. Null: ``block_size``."""
    complete_chains: int = 0
    """Requests with hashes for all full blocks, including output blocks."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the blocks of the requests in order, at most ``MOST_BLOCKS`` at a time to bound memory."""
        first_runs, first = self._first_runs(), 0
        while first < len(self.limits):
            end = int(np.searchsorted(self.starts, self.starts[first] + MOST_BLOCKS, side="right")) - 1
            end = min(max(end, first + 1), len(self.limits))
            yield self._piece(first_runs, first, end)
            first = end

    def _first_runs(self) -> IntArray:
        return np.append(0, np.cumsum(self.chains.runs))

    def _piece(self, first_runs: IntArray, first: int, end: int) -> Piece:
        starts, order = self.starts[first : end + 1] - self.starts[first], self.order[first:end]
        runs = chain_indices(first_runs[order], self.chains.runs[order])
        blocks = np.full(int(starts[-1]), PRIVATE)
        numbers = chain_indices(self.chains.firsts[runs].astype(np.int64), self.chains.lengths[runs].astype(np.int64))
        blocks[leading(starts, self.hashed_blocks[first:end])] = numbers
        return Piece(first, blocks, starts)

    @property
    def distinct(self) -> int:
        """Number of distinct blocks, including private blocks."""
        return self.numbers + int(self.starts[-1] - self.hashed_blocks.sum())

    @property
    def blocks(self) -> IntArray:
        """All blocks as dense numbers 0 … distinct − 1."""
        blocks = self._piece(self._first_runs(), 0, len(self.limits)).blocks
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
class HashedChains:
    """Requests of a trace, in its order, with the numbers of their hashed blocks."""

    chains: PackedChains
    numbers: int
    """Upper bound of the block numbers, exclusive."""
    hashed_blocks: IntArray
    """Leading full blocks of ``block_size`` tokens with a hash: the length of each chain."""
    prompt_tokens: IntArray
    """1 or more."""
    prompt_logprobs: IntArray
    """1: log probabilities of the prompt are requested, so no prefix lookup; 0: prefix lookup."""
    arrival_ms: FloatArray
    block_size: int
    fine_block_size: int
    """The trace's."""
    complete_chains: int

    @property
    def order(self) -> IntArray:
        return arrival_order(self.arrival_ms)


def arrival_order(arrival_ms: FloatArray) -> IntArray:
    """Return the order of the requests by arrival; file order if a time is missing."""
    timed = not np.isnan(arrival_ms).any()
    return np.argsort(arrival_ms, kind="stable") if timed else np.arange(len(arrival_ms))


def lay_out_accesses(chains: HashedChains) -> Accesses:
    """Return the block accesses in order of arrival; prompt blocks without a hash are private."""
    order = chains.order
    hashed_blocks, tokens = chains.hashed_blocks[order], chains.prompt_tokens[order]
    blocks = np.maximum(tokens // chains.block_size, hashed_blocks)
    return Accesses(
        chains=chains.chains,
        order=order,
        hashed_blocks=hashed_blocks,
        starts=np.concatenate([[0], np.cumsum(blocks)]),
        limits=(tokens - 1) // chains.block_size * (1 - chains.prompt_logprobs[order]),
        numbers=chains.numbers,
        block_size=chains.block_size,
        prompt_tokens=tokens,
        arrival_ms=chains.arrival_ms[order],
        fine_block_size=chains.fine_block_size,
        complete_chains=chains.complete_chains,
    )
