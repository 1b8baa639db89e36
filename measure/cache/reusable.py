"""Reusable prompt tokens: prefix hits in an unlimited cache, in full blocks of earlier requests."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from measure.cache.chains import NO_HASHES, Chains, chain_indices
from tracefile.records.arrays import FloatArray, Int32Array, IntArray, UInt64Array
from tracefile.records.batches import NO_LIST, Batch

if TYPE_CHECKING:
    from measure.cache.interning import Interner
    from tracefile.outputs import InferredOutputs

AT_ONCE: Final = 1 << 14
"""Requests processed at a time."""


@dataclass(slots=True)
class PromptChains:
    """Chains of block hashes, collected batch by batch: prompt blocks, then output blocks."""

    block_size: int
    compiled: bool = False
    """True: number hashes by first occurrence, in memory that grows with the distinct hashes. False: sort all hashes at
    the end, without the import of compiled modules."""
    inferred: "InferredOutputs | None" = None
    """Hashes inferred for outputs. Null: none are inferred."""
    _interner: "Interner | None" = None
    _values: list[npt.NDArray[Any]] = field(default_factory=list)
    _starts: list[IntArray] = field(default_factory=list)
    _prompts: list[IntArray] = field(default_factory=list)
    _true: list[IntArray] = field(default_factory=list)
    _outputs: list[IntArray] = field(default_factory=list)
    _unread: list[IntArray] = field(default_factory=list)
    _count: int = 0

    def add(self, batch: Batch) -> None:
        hashes = batch.hashes() if self.inferred is None else self.inferred.fill_hashes(batch, batch.hashes())
        prompts = np.where(hashes.prompt_blocks == NO_LIST, NO_HASHES, hashes.prompt_blocks)
        self._values.append(self._numbered(hashes.values) if self.compiled else hashes.values)
        self._starts.append(hashes.starts + self._count)
        self._count += len(hashes.values)
        self._prompts.append(prompts)
        true = batch.numbers("hashable_blocks", NO_HASHES)
        self._true.append(np.where(true == NO_HASHES, prompts, np.minimum(true, prompts)))
        self._outputs.append(np.maximum(hashes.output_blocks, 0))
        self._unread.append(batch.numbers("prompt_logprobs"))

    def _numbered(self, values: UInt64Array) -> Int32Array:
        if not len(values):
            return np.empty(0, np.int32)
        if self._interner is None:
            from measure.cache.interning import Interner  # noqa: PLC0415 - for traces with hashes alone

            self._interner = Interner()
        return self._interner.number(values.astype(np.uint64, copy=False))

    def pop_chains(self) -> Chains:
        """Return the chains of block hashes of all batches, and release the batches."""
        values = _joined(self._values)
        if self._interner is not None:
            numbers, hashes = values, self._interner.hashes
        else:
            hashes, indices = np.unique(values.astype(np.uint64, copy=False), return_inverse=True)
            numbers = indices.astype(np.int32)
        columns = map(_joined, (self._starts, self._prompts, self._true, self._outputs, self._unread))
        return Chains(self.block_size, numbers, hashes, *columns)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def reusable_tokens(
    chains: Chains, arrival_ms: FloatArray, end_ms: FloatArray, prompt_tokens: IntArray, block_size: int
) -> IntArray:
    """Return the prefix hit of each prompt in an unlimited cache, in tokens: leading blocks of earlier prompts or of
    outputs that have ended.

    ``block_size``: the engine's, a multiple of the chains'. The last prompt token is always computed, so its block
    never hits; nor does a block of a prompt without a prefix lookup. NO_HASHES: the record has no hashes.
    """
    n, hashed = len(arrival_ms), np.maximum(chains.true, 0)
    # Prompts count from their arrival, outputs from their end; at equal times an end precedes an arrival.
    times = np.concatenate([arrival_ms, end_ms])
    order = np.lexsort((np.arange(2 * n) < n, times))
    ranks = np.empty(2 * n, np.int32)
    ranks[order] = np.arange(2 * n)
    outputs = np.where(chains.true == chains.prompts, chains.outputs, 0)  # a partial chain has no output
    first_rank = np.full(len(chains.hashes), 2 * n, np.int32)
    for starts, counts, at in (
        (chains.starts, hashed, ranks[:n]),
        (chains.starts + np.maximum(chains.prompts, 0), outputs, ranks[n:]),
    ):
        for rows in _row_slices(n):
            numbers = chains.numbers[chain_indices(starts[rows], counts[rows])]
            np.minimum.at(first_rank, numbers, np.repeat(at[rows], counts[rows]))
    hit_blocks = [_hit_blocks(chains, hashed, first_rank, ranks, rows) for rows in _row_slices(n)]
    hit_tokens = np.concatenate([np.empty(0, np.int64), *hit_blocks]) * chains.block_size
    most = np.where(prompt_tokens > 0, prompt_tokens - 1, hit_tokens)
    tokens = np.minimum(hit_tokens, most) // block_size * block_size * (1 - np.minimum(chains.unread, 1))
    return np.where(chains.prompts == NO_HASHES, NO_HASHES, tokens)


def _hit_blocks(chains: Chains, hashed: IntArray, first_rank: Int32Array, ranks: Int32Array, rows: slice) -> IntArray:
    """Count the leading blocks of prompts that occurred before their arrivals."""
    counts = hashed[rows]
    numbers = chains.numbers[chain_indices(chains.starts[rows], counts)]
    missed = np.append(np.flatnonzero(first_rank[numbers] >= np.repeat(ranks[rows], counts)), len(numbers))
    begins = np.cumsum(counts) - counts
    return np.asarray(np.minimum(missed[np.searchsorted(missed, begins)] - begins, counts))


def _row_slices(n: int) -> Iterator[slice]:
    return (slice(first, min(first + AT_ONCE, n)) for first in range(0, n, AT_ONCE))
