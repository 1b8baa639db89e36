"""Prompt tokens that an unlimited prefix cache would hold: whole blocks of requests that came before."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from measure.cache.chains import NO_HASHES, Chains, chain_places
from tracefile.records.arrays import FloatArray, Int32Array, IntArray, UInt64Array
from tracefile.records.batches import NO_LIST, Batch

if TYPE_CHECKING:
    from measure.cache.interning import Interner
    from tracefile.outputs import InferredOutputs

AT_ONCE: Final = 1 << 14
"""Requests whose blocks are laid out at a time."""


@dataclass(slots=True)
class PromptChains:
    """Chains of a trace's requests as they are read: a prompt's blocks, then its output's."""

    block_size: int
    compiled: bool = False
    """True: hashes are numbered as they come, first ones first, in memory that follows the distinct ones. False: they
    are sorted at the end, without the import of a compiler."""
    inferred: "InferredOutputs | None" = None
    """Null: outputs without hashes stay so."""
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

    def take(self) -> Chains:
        """Return the chains of all batches, and drop them here."""
        values = _joined(self._values)
        if self._interner is not None:
            numbers, hashes = values, self._interner.hashes
        else:
            hashes, indices = np.unique(values.astype(np.uint64, copy=False), return_inverse=True)
            numbers = indices.astype(np.int32)
        rest = map(_joined, (self._starts, self._prompts, self._true, self._outputs, self._unread))
        return Chains(self.block_size, numbers, hashes, *rest)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def reusable_tokens(
    chains: Chains, arrival_ms: FloatArray, end_ms: FloatArray, prompt_tokens: IntArray, block_size: int
) -> IntArray:
    """Return tokens of the leading prompt blocks that came in an earlier prompt, or in an output that had ended.

    ``block_size``: the engine's, a multiple of the chains'. A prompt's last token is always computed, so a block that
    holds it is no hit; nor is any of a prompt that is not looked up. NO_HASHES: the record has none.
    """
    n, known = len(arrival_ms), np.maximum(chains.true, 0)
    # Each prompt at its arrival, each output at its end; an end comes before an arrival at the same time.
    times = np.concatenate([arrival_ms, end_ms])
    order = np.lexsort((np.arange(2 * n) < n, times))
    ranks = np.empty(2 * n, np.int32)
    ranks[order] = np.arange(2 * n)
    outputs = np.where(chains.true == chains.prompts, chains.outputs, 0)  # a chain that stops in the prompt has none
    first_seen = np.full(len(chains.hashes), 2 * n, np.int32)
    for starts, counts, at in (
        (chains.starts, known, ranks[:n]),
        (chains.starts + np.maximum(chains.prompts, 0), outputs, ranks[n:]),
    ):
        for rows in _parts(n):
            numbers = chains.numbers[chain_places(starts[rows], counts[rows])]
            np.minimum.at(first_seen, numbers, np.repeat(at[rows], counts[rows]))
    seen = [_leading_seen(chains, known, first_seen, ranks, rows) for rows in _parts(n)]
    seen_tokens = np.concatenate([np.empty(0, np.int64), *seen]) * chains.block_size
    most = np.where(prompt_tokens > 0, prompt_tokens - 1, seen_tokens)
    tokens = np.minimum(seen_tokens, most) // block_size * block_size * (1 - np.minimum(chains.unread, 1))
    return np.where(chains.prompts == NO_HASHES, NO_HASHES, tokens)


def _leading_seen(chains: Chains, known: IntArray, first_seen: Int32Array, ranks: Int32Array, rows: slice) -> IntArray:
    """Count the leading known blocks of some prompts that were seen before their arrivals."""
    counts = known[rows]
    numbers = chains.numbers[chain_places(chains.starts[rows], counts)]
    missed = np.append(np.flatnonzero(first_seen[numbers] >= np.repeat(ranks[rows], counts)), len(numbers))
    begins = np.cumsum(counts) - counts
    return np.asarray(np.minimum(missed[np.searchsorted(missed, begins)] - begins, counts))


def _parts(n: int) -> Iterator[slice]:
    return (slice(first, min(first + AT_ONCE, n)) for first in range(0, n, AT_ONCE))
