"""Prompts of a trace as columns: lengths and block hashes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from measure.cache.chains import chain_indices
from measure.cache.vectors import integers
from sim.vllm.request import ANY_HITS, Request
from sim.workload.chain import Chains, hashed_block_counts, leading_hashes
from tracefile.compiled import warn_if_plain
from tracefile.records.arrays import BoolArray, FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch, Hashes

MANY = 100_000
"""Requests from which on an uncompiled run takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Requests with a prompt, in file order: tokens and block hashes."""

    block_size: int
    prompt_tokens: IntArray
    computed_tokens: IntArray
    """Tokens with computed KV: all but the last output token."""
    unread: IntArray
    """1: log probabilities of the prompt are requested, so no prefix lookup; 0: prefix lookup."""
    turn: IntArray
    """0: unknown; turns count from 1."""
    arrival_ms: FloatArray
    """NaN: not recorded."""
    hashed_blocks: IntArray
    """Leading full blocks with a hash in the trace."""
    keys: UInt64Array
    """Block hashes, request by request."""

    def __len__(self) -> int:
        return len(self.hashed_blocks)

    @property
    def starts(self) -> IntArray:
        """Index of each request's first block key, and the end."""
        return np.append(0, np.cumsum(self.hashed_blocks))

    @property
    def prompt_blocks(self) -> IntArray:
        """Hashed full blocks of each prompt."""
        return np.minimum(self.prompt_tokens // self.block_size, self.hashed_blocks)

    @property
    def most_hits(self) -> IntArray:
        """Longest possible prefix hit, in blocks: the last token is always computed (rule 6)."""
        blocks = (self.prompt_tokens - 1) // self.block_size * (1 - self.unread)
        return np.asarray(np.minimum(blocks, self.hashed_blocks))

    @property
    def full_blocks(self) -> IntArray:
        """Full blocks at the end of each request."""
        return self.computed_tokens // self.block_size

    @property
    def num_blocks(self) -> IntArray:
        """Blocks in use at the end of each request."""
        return -(-self.computed_tokens // self.block_size)

    def fit(self, usable_blocks: int | None) -> BoolArray:
        """Return for each request whether it alone fits a block pool."""
        return np.ones(len(self), bool) if usable_blocks is None else np.asarray(self.num_blocks <= usable_blocks)

    def select(self, rows: BoolArray) -> "Prompts":
        """Return the requests at ``rows``."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        indices = chain_indices(self.starts[:-1][rows], self.hashed_blocks[rows])
        return replace(self, **columns, keys=self.keys[indices])

    def requests(self) -> Iterator[Request]:
        """Yield the requests for a KV cache."""
        if len(self) > MANY:
            warn_if_plain()
        keys, output_tokens = integers(self.keys), self.computed_tokens + 1 - self.prompt_tokens
        limits = np.where(self.unread > 0, 0, ANY_HITS)
        columns = (self.prompt_tokens, output_tokens, self.starts[:-1], self.hashed_blocks, limits)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, (prompt, output, first, hashed, most) in enumerate(rows):
            yield Request("", prompt, output, keys, first_key=first, num_keys=hashed, index=index, hit_limit=most)


_COLUMNS = [field.name for field in fields(Prompts) if field.name not in ("block_size", "keys")]


def read_prompts(batches: Iterable[tuple[Batch, Hashes]], chains: Chains) -> Prompts:
    """Return the prompts of all batches; at least one batch."""
    return join_prompts([lay_out(batch, hashes, chains) for batch, hashes in batches])


def join_prompts(prompts: Sequence[Prompts]) -> Prompts:
    """Concatenate prompts, in order."""
    names = (*_COLUMNS, "keys")
    columns: dict[str, Any] = {name: np.concatenate([getattr(rows, name) for rows in prompts]) for name in names}
    return replace(prompts[0], **columns)


def lay_out(batch: Batch, hashes: Hashes, chains: Chains) -> Prompts:
    """Return the prompts of a batch, with the hashes of their full blocks."""
    tokens = batch.numbers("prompt_tokens")
    rows = np.flatnonzero(tokens > 0)
    hashed_blocks = hashed_block_counts(batch, hashes, chains)[rows]
    return Prompts(
        block_size=chains.block_size,
        prompt_tokens=tokens[rows],
        computed_tokens=tokens[rows] + np.maximum(batch.numbers("output_tokens")[rows] - 1, 0),
        unread=batch.numbers("prompt_logprobs")[rows],
        turn=batch.numbers("turn")[rows],
        arrival_ms=batch.times("arrival_ms")[rows],
        hashed_blocks=hashed_blocks,
        keys=leading_hashes(hashes, hashes.starts[rows], hashed_blocks, chains.factor),
    )
