"""Requests as flat arrays of block numbers in order of arrival, for the passes that touch each block in turn."""

from dataclasses import dataclass

import numpy as np

from measure.cache.chains import Int32Array
from measure.cache.interning import NumberedChains, lay_out_numbers, leading, unlimited_hits
from tracefile.records.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Accesses:
    """Requests one after another, each with its full blocks, root to leaf: its prompt's, then its output's."""

    blocks: Int32Array
    """Dense numbers 0 … distinct − 1; a prompt block whose hash is not known has one of its own."""
    starts: IntArray
    """Where each request's blocks start in ``blocks``; one more entry than requests."""
    limits: IntArray
    """How many leading blocks each request may hit."""
    distinct: int
    block_size: int
    prompt_tokens: IntArray
    arrival_ms: FloatArray
    """NaN: not recorded."""
    fine_block_size: int | None = None
    """The trace's block size. Null: ``block_size``."""
    whole_chains: int = 0
    """Requests whose filled blocks are all known, outputs' included."""

    @property
    def input_tokens(self) -> int:
        return int(self.prompt_tokens.sum())

    @property
    def lookup_blocks(self) -> IntArray:
        """Full prompt blocks of each request, the first of its blocks."""
        return self.prompt_tokens // self.block_size

    @property
    def asked(self) -> BoolArray:
        """True where a block belongs to a prompt: outputs are written, not looked up."""
        return leading(self.starts, self.lookup_blocks)

    @property
    def request_of(self) -> IntArray:
        """Request of each of ``blocks``."""
        return np.repeat(np.arange(len(self.limits)), np.diff(self.starts))

    @property
    def may_hit(self) -> BoolArray:
        """True where a block is short of its prompt's last token."""
        return leading(self.starts, self.limits)

    @property
    def unlimited_hits(self) -> IntArray:
        """Hits of each request in an unlimited cache."""
        return unlimited_hits(self.blocks, self.starts, self.limits, self.distinct)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChains:
    """Requests of a trace, in its order, with the numbers of the blocks whose hashes it knows."""

    numbered: NumberedChains
    known: IntArray
    """Leading full blocks, of ``block_size``, that are known."""
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
        """Requests by arrival; as they are if a time is missing."""
        timed = not np.isnan(self.arrival_ms).any()
        return np.argsort(self.arrival_ms, kind="stable") if timed else np.arange(len(self.arrival_ms))


def lay_out_accesses(chains: KnownChains) -> Accesses:
    """Return the requests in order of arrival; prompt blocks that are not known get numbers of their own."""
    order = chains.order
    known, tokens = chains.known[order], chains.prompt_tokens[order]
    blocks = np.maximum(tokens // chains.block_size, known)
    starts = np.concatenate([[0], np.cumsum(blocks)])
    numbered = chains.numbered._replace(firsts=chains.numbered.firsts[order])
    found = lay_out_numbers(numbered, known, blocks, starts[:-1], int(starts[-1]))
    return Accesses(
        blocks=found.keys,
        starts=starts,
        limits=(tokens - 1) // chains.block_size * (1 - chains.prompt_logprobs[order]),
        distinct=found.distinct,
        block_size=chains.block_size,
        prompt_tokens=tokens,
        arrival_ms=chains.arrival_ms[order],
        fine_block_size=chains.fine_block_size,
        whole_chains=chains.whole_chains,
    )
