"""A batch of a trace as arrivals, column by column: what ``sim.workload.workload`` says of one record, of all at
once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sim.workload.arrivals import NOBODY, Arrivals, require_times
from sim.workload.chain import Chains, end_reading
from sim.workload.interning import chain_places
from tracefile.records.arrays import BoolArray, IntArray
from tracefile.records.batches import NO_LIST, Batch, Hashes
from tracefile.records.reader import TraceReader

UNKNOWN = -1


REPLACED = (
    *("scheduled_ms", "first_byte_ms", "ttft_ms", "itl_ms", "itl_tokens", "output_tokens", "cached_tokens"),
    *("concurrency", "extra"),
)
"""Fields that a predicted record has afresh."""


@dataclass(slots=True)
class BatchPlan:
    """How a trace's batches are asked of an engine."""

    chains: Chains
    path: Path
    cold_prompts: bool = False
    hashed: bool = False
    """Whether any record so far had hashes."""

    def every(self, batches: Iterable[Batch]) -> Iterator[Arrivals]:
        """All ``batches``; numbers begin anew in each."""
        return (self.arrivals(batch) for batch in batches)

    def arrivals(self, batch: Batch) -> Arrivals:
        """Roots, in the trace's order; raises InputError naming a record without a time."""
        ids = [name or "" for name in batch.words("request_id")]
        arrival_ms, e2e_ms = batch.times("arrival_ms"), batch.times("e2e_ms")
        require_times(self.path, ids, arrival_ms)
        prompt_tokens, output_tokens = batch.numbers("prompt_tokens"), asked_tokens(batch)
        runs = (prompt_tokens > 0) & (output_tokens > 0) & _reached_engine(batch)
        full = np.where(runs, (prompt_tokens + output_tokens - 1) // self.chains.block_size, 0)
        known, hashes = self._known(batch, full)
        count = len(batch)
        abort_after_ms = np.where(_is(batch, "ok"), np.nan, e2e_ms)
        priority = batch.numbers("priority")
        batch.forget(REPLACED)
        return Arrivals(
            ids=ids,
            numbers=np.arange(count),
            arrival_ms=arrival_ms,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            runs=runs,
            priority=priority,
            abort_after_ms=abort_after_ms,
            recorded_e2e_ms=e2e_ms,
            parents=np.full(count, NOBODY),
            last_children=np.full(count, NOBODY),
            think_ms=np.full(count, np.nan),
            full_blocks=full,
            known=known,
            hashes=hashes,
            sources=(batch,),
            source=np.zeros(count, np.int64),
            rows=np.arange(count),
        )

    def _known(self, batch: Batch, full: IntArray) -> tuple[IntArray, npt.NDArray[np.uint64]]:
        """How many of the ``full`` blocks the trace knows the hashes of, and these, request after request."""
        if self.cold_prompts:
            return np.zeros(len(batch), np.int64), np.empty(0, np.uint64)
        hashes = batch.hashes()
        self.hashed = self.hashed or bool((hashes.prompt_blocks != NO_LIST).any())
        known = np.minimum(known_blocks(batch, hashes, self.chains), full)
        return known, leading_keys(hashes, hashes.starts, known, self.chains.factor)


def leading_keys(hashes: Hashes, starts: IntArray, known: IntArray, factor: int) -> npt.NDArray[np.uint64]:
    """The first ``known`` keys of the chains at ``starts``, in blocks of ``factor`` of the trace's, one chain after
    another: hash number i of a chain of larger blocks is the last of the smaller ones that it is made of."""
    within = chain_places(np.zeros(len(known), np.int64), known)
    return np.asarray(hashes.values[np.repeat(starts, known) + within * factor + factor - 1])


def hashed_batches(reader: TraceReader) -> Iterator[tuple[Batch, Hashes]]:
    """A trace's batches and their chains, as they come; at the end the reader's warnings go to stderr.

    Raises InputError, at the end too, if no record had hashes.
    """
    hashed = False
    for batch in reader.batches():
        hashes = batch.hashes()
        hashed = hashed or bool((hashes.prompt_blocks != NO_LIST).any())
        yield batch, hashes
    end_reading(reader, hashed=hashed)


def known_prompt_blocks(batch: Batch, hashes: Hashes, chains: Chains) -> IntArray:
    """How many leading blocks of the prompt have a hash in the trace that is theirs."""
    prompt = np.maximum(hashes.prompt_blocks, 0) // chains.factor
    true = batch.numbers("hashable_blocks", UNKNOWN)
    return np.where(true == UNKNOWN, prompt, np.minimum(true // chains.factor, prompt))


def known_blocks(batch: Batch, hashes: Hashes, chains: Chains) -> IntArray:
    """How many leading blocks of ``Chains.whole`` have a hash in the trace."""
    prompt_tokens, output_tokens = batch.numbers("prompt_tokens"), batch.numbers("output_tokens")
    prompt = np.maximum(hashes.prompt_blocks, 0)
    whole = prompt == prompt_tokens // chains.fine_block_size
    in_all = (prompt + np.maximum(hashes.output_blocks, 0)) // chains.factor
    prompt //= chains.factor
    known = known_prompt_blocks(batch, hashes, chains)
    goes_on = (known == prompt) & (known == prompt_tokens // chains.block_size)
    goes_on &= (hashes.output_blocks != NO_LIST) & (whole | (chains.factor == 1))
    computed = prompt_tokens + np.maximum(output_tokens - 1, 0)
    return np.minimum(np.where(goes_on, in_all, known), computed // chains.block_size)


def asked_tokens(batch: Batch) -> IntArray:
    """Output tokens that each request asks for, as ``sim.workload.workload`` tells it of one."""
    most = batch.numbers("max_tokens")
    streamed = np.where(np.isnan(batch.times("ttft_ms")), 0, batch.lengths("itl_ms") + 1)
    seen = batch.numbers("output_tokens")
    seen = np.where(seen == 0, streamed, seen)
    return np.where(_is(batch, "ok"), np.where(seen == 0, most, seen), np.maximum(np.maximum(most, seen), 1))


def _reached_engine(batch: Batch) -> BoolArray:
    answered = ~_is(batch, "error") | (batch.numbers("http_status") == 200)
    return np.asarray(_is(batch, "ok") | (~np.isnan(batch.times("e2e_ms")) & answered))


def _is(batch: Batch, status: str) -> BoolArray:
    return np.array([(word or "ok") == status for word in batch.words("status")], bool)
