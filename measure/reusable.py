"""Prompt tokens that an unlimited prefix cache would hold: whole blocks of requests that came before."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from tracefile.records.arrays import FloatArray, IntArray, UInt64Array
from tracefile.records.batches import NO_LIST, Batch

NO_HASHES: Final = -1


@dataclass(slots=True)
class PromptChains:
    """Chains of a trace's requests as they are read: a prompt's known blocks, then its output's."""

    block_size: int
    _values: list[UInt64Array] = field(default_factory=list)
    _starts: list[IntArray] = field(default_factory=list)
    """Place of each chain in the values of all batches."""
    _prompts: list[IntArray] = field(default_factory=list)
    """Blocks of each prompt; NO_HASHES: the record has none."""
    _true: list[IntArray] = field(default_factory=list)
    """Leading blocks that the chain is true for."""
    _outputs: list[IntArray] = field(default_factory=list)
    _count: int = 0

    def add(self, batch: Batch) -> None:
        hashes = batch.hashes()
        prompts = np.where(hashes.prompt_blocks == NO_LIST, NO_HASHES, hashes.prompt_blocks)
        self._values.append(hashes.values)
        self._starts.append(hashes.starts + self._count)
        self._count += len(hashes.values)
        self._prompts.append(prompts)
        true = batch.numbers("hashable_blocks", NO_HASHES)
        self._true.append(np.where(true == NO_HASHES, prompts, np.minimum(true, prompts)))
        self._outputs.append(np.maximum(hashes.output_blocks, 0))

    def take(self) -> "Chains":
        """Return the chains of all batches, and drop them here."""
        found = Chains(
            np.concatenate(self._values).astype(np.uint64, copy=False),
            np.concatenate(self._starts),
            np.concatenate(self._prompts),
            np.concatenate(self._true),
            np.concatenate(self._outputs),
        )
        for parts in (self._values, self._starts, self._prompts, self._true, self._outputs):
            parts.clear()
        return found


class Chains(NamedTuple):
    """Chains of n requests in one array."""

    values: UInt64Array
    starts: IntArray
    prompts: IntArray
    true: IntArray
    outputs: IntArray


def reusable_tokens(
    chains: PromptChains, arrival_ms: FloatArray, end_ms: FloatArray, prompt_tokens: IntArray, block_size: int
) -> IntArray:
    """Return tokens of the leading prompt blocks that came in an earlier prompt, or in an output that had ended.

    ``block_size``: the engine's, a multiple of the chains'. A prompt's last token is always computed, so a block that
    holds it is no hit. NO_HASHES: the record has none.
    """
    size = chains.block_size
    values, starts, prompts, true, outputs = chains.take()
    known = np.maximum(true, 0)
    # Each prompt at its arrival, each output at its end; an end comes before an arrival at the same time.
    times = np.concatenate([arrival_ms, end_ms])
    outputs = np.where(true == prompts, outputs, 0)  # a chain that stops in the prompt has no output
    counts = np.concatenate([known, outputs])
    of_prompt = np.arange(len(times)) < len(prompts)
    order = np.lexsort((of_prompt, times))
    firsts = np.concatenate([starts, starts + np.maximum(prompts, 0)])[order]
    counts = counts[order]
    laid_out = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) + np.repeat(firsts - laid_out, counts)
    values = values[places]
    del places
    new = np.append(np.sort(np.unique(values, return_index=True)[1]), len(values))
    places_of_prompts = np.empty(len(times), np.int64)
    places_of_prompts[order] = laid_out
    begins = places_of_prompts[: len(prompts)]
    seen = new[np.searchsorted(new, begins)] - begins
    seen_tokens = np.minimum(seen, known) * size
    most = np.where(prompt_tokens > 0, prompt_tokens - 1, seen_tokens)
    return np.where(prompts == NO_HASHES, NO_HASHES, np.minimum(seen_tokens, most) // block_size * block_size)
