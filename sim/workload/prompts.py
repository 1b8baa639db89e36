"""A trace's prompts as columns, for passes over all of them: lengths, and the block hashes that the trace knows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from measure.cache.chains import chain_places
from measure.cache.vectors import integers
from sim.vllm.request import ANY_HITS, Request
from sim.workload.chain import Chains, known_blocks, leading_hashes
from tracefile.compiled import warn_if_plain
from tracefile.records.arrays import BoolArray, FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch, Hashes

MANY = 100_000
"""Requests of which the plain form takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Requests with a prompt, in file order."""

    block_size: int
    prompt_tokens: IntArray
    computed_tokens: IntArray
    """All but the last output token, whose KV is never computed."""
    unread: IntArray
    """1: log probabilities of the prompt were asked for, so that it is not looked up; 0: it is."""
    turn: IntArray
    """0: unknown; turns count from 1."""
    arrival_ms: FloatArray
    """NaN: not recorded."""
    known: IntArray
    """Leading full blocks whose hash the trace has."""
    keys: UInt64Array
    """Hashes of the known blocks, request after request."""

    def __len__(self) -> int:
        return len(self.known)

    @property
    def starts(self) -> IntArray:
        """Place of each request's first key, and the end."""
        return np.append(0, np.cumsum(self.known))

    @property
    def prompt_blocks(self) -> IntArray:
        """Known full blocks of each prompt."""
        return np.minimum(self.prompt_tokens // self.block_size, self.known)

    @property
    def most_hits(self) -> IntArray:
        """Leading blocks that may hit: the last token is always computed (rule 6)."""
        return np.asarray(np.minimum((self.prompt_tokens - 1) // self.block_size * (1 - self.unread), self.known))

    @property
    def full_blocks(self) -> IntArray:
        """Blocks that are full at each request's end."""
        return self.computed_tokens // self.block_size

    @property
    def num_blocks(self) -> IntArray:
        """Blocks that each request holds at its end."""
        return -(-self.computed_tokens // self.block_size)

    def fit(self, usable_blocks: int | None) -> BoolArray:
        """Return for each request if it fits a pool alone."""
        return np.ones(len(self), bool) if usable_blocks is None else np.asarray(self.num_blocks <= usable_blocks)

    def take(self, rows: BoolArray) -> "Prompts":
        """Return the requests of some rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        indices = chain_places(self.starts[:-1][rows], self.known[rows])
        return replace(self, **columns, keys=self.keys[indices])

    def requests(self) -> Iterator[Request]:
        """Yield the requests as a KV cache gets them."""
        if len(self) > MANY:
            warn_if_plain()
        keys, output_tokens = integers(self.keys), self.computed_tokens + 1 - self.prompt_tokens
        limits = np.where(self.unread > 0, 0, ANY_HITS)
        columns = (self.prompt_tokens, output_tokens, self.starts[:-1], self.known, limits)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, (prompt, output, first, known, most) in enumerate(rows):
            yield Request("", prompt, output, keys, first_key=first, num_keys=known, index=index, hit_limit=most)


_COLUMNS = [field.name for field in fields(Prompts) if field.name not in ("block_size", "keys")]


def read_prompts(batches: Iterable[tuple[Batch, Hashes]], chains: Chains) -> Prompts:
    """Return the prompts of all batches, one at least."""
    return join_prompts([lay_out(batch, hashes, chains) for batch, hashes in batches])


def join_prompts(parts: Sequence[Prompts]) -> Prompts:
    """Return the prompts of all parts, in order."""
    names = (*_COLUMNS, "keys")
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **columns)


def lay_out(batch: Batch, hashes: Hashes, chains: Chains) -> Prompts:
    """Return the prompts of a batch."""
    tokens = batch.numbers("prompt_tokens")
    rows = np.flatnonzero(tokens > 0)
    known = known_blocks(batch, hashes, chains)[rows]
    return Prompts(
        block_size=chains.block_size,
        prompt_tokens=tokens[rows],
        computed_tokens=tokens[rows] + np.maximum(batch.numbers("output_tokens")[rows] - 1, 0),
        unread=batch.numbers("prompt_logprobs")[rows],
        turn=batch.numbers("turn")[rows],
        arrival_ms=batch.times("arrival_ms")[rows],
        known=known,
        keys=leading_hashes(hashes, hashes.starts[rows], known, chains.factor),
    )
