"""Arrivals of a simulated engine as columns: tokens, block hashes, times. No other module reads trace fields for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from measure.cache.chains import chain_indices
from sim.workload.chain import Chains, hashed_block_counts, leading_hashes
from tracefile.outputs import InferredOutputs, infer_outputs
from tracefile.records.arrays import BoolArray, FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch
from tracefile.records.decoding import RecordColumns
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests as clients send them, in order of submission. Columns have a row per request, except ``hashes``."""

    ids: list[str]
    numbers: IntArray
    """Rows in the complete workload, ascending."""
    arrival_ms: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    runs: BoolArray
    prompt_logprobs: IntArray
    """1: log probabilities of the prompt are requested, so no prefix lookup; 0: prefix lookup."""
    abort_after_ms: FloatArray
    """Time from the arrival to the client's abort. NaN: no abort."""
    recorded_e2e_ms: FloatArray
    parents: IntArray
    """Number of the parent request, whose end the turn waits for; NOBODY: no parent, or the parent has ended."""
    think_ms: FloatArray
    """Think time, from the parent's end to the arrival; NaN: no parent."""
    full_blocks: IntArray
    """Number of full blocks at the end, at least."""
    hashed_blocks: IntArray
    """Leading full blocks with a hash in the trace."""
    hashes: UInt64Array
    """Block hashes, request by request."""
    batch: Batch
    rows: IntArray
    """Row of each request's record in ``batch``."""

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: IntArray) -> Self:
        """Select ``rows``, in that order."""
        starts = np.cumsum(self.hashed_blocks) - self.hashed_blocks
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        columns |= {
            "ids": list(map(self.ids.__getitem__, rows.tolist())),
            "hashes": self.hashes[chain_indices(starts[rows], self.hashed_blocks[rows])],
        }
        return replace(self, **columns)

    def column(self, name: str) -> list[Any]:
        """Return a record field of all requests."""
        column = self.batch.column(name)
        return [column[row] for row in self.rows.tolist()]

    def records(self, rows: IntArray) -> Iterator[Record]:
        """Return the records at ``rows``, which the caller may change."""
        return map(self.batch.record, self.rows[rows].tolist())


_COLUMNS = [field.name for field in fields(Arrivals) if field.name not in ("ids", "hashes", "batch")]


def plan_arrivals(
    meta: Meta,
    records: list[Record] | RecordColumns,
    block_size: int,
    *,
    path: str | Path = "trace",
    cold_prompts: bool = False,
    replay_sessions: bool = False,
    needs_hashes: bool = True,
) -> Arrivals:
    """Convert records to arrivals, in their order. Raises InputError naming a record that cannot be simulated.

    An aborted request generates up to ``max_tokens`` (if unknown, the tokens that it received) and is aborted at the
    recorded time after its arrival. A request that failed before its response never reached the engine.
    """
    batch, chains, count = Batch(records), Chains(meta, block_size), len(records)
    ids = [name or "" for name in batch.column("request_id")]
    arrival_ms, e2e_ms = batch.times("arrival_ms"), batch.times("e2e_ms")
    require_times(path, ids, arrival_ms)
    prompt_tokens, output_tokens = batch.numbers("prompt_tokens"), requested_tokens(batch)
    runs = (prompt_tokens > 0) & (output_tokens > 0) & _reached_engine(batch)
    full = np.where(runs, (prompt_tokens + output_tokens - 1) // chains.block_size, 0)
    hashed_blocks, hashes = np.zeros(count, np.int64), np.empty(0, np.uint64)
    if not cold_prompts:
        hashed_blocks, hashes = _hashes(batch, infer_outputs(meta, records), chains, full)
        if needs_hashes and not batch.count("block_hashes"):
            raise InputError(f"{path}: block_hashes: no record has any; expected a trace with them, or --cold-prompts")
    arrivals = Arrivals(
        ids=ids,
        numbers=np.arange(count),
        arrival_ms=arrival_ms,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        runs=runs,
        prompt_logprobs=batch.numbers("prompt_logprobs"),
        abort_after_ms=np.where(batch.equal("status", "ok"), np.nan, e2e_ms),
        recorded_e2e_ms=e2e_ms,
        parents=np.full(count, NOBODY),
        think_ms=np.full(count, np.nan),
        full_blocks=full,
        hashed_blocks=hashed_blocks,
        hashes=hashes,
        batch=batch,
        rows=np.arange(count),
    )
    if not replay_sessions:
        return arrivals
    parents, think_ms = parents_of(ids, batch.column("parent_id"), arrival_ms, e2e_ms, batch.times("think_ms"))
    return replace(arrivals, parents=parents, think_ms=think_ms)


def _hashes(batch: Batch, inferred: InferredOutputs, chains: Chains, full: IntArray) -> tuple[IntArray, UInt64Array]:
    """Return the number of ``full`` blocks with a hash in the trace, and these hashes, request by request."""
    hashes = inferred.fill_hashes(batch, batch.hashes())
    hashed_blocks = np.minimum(hashed_block_counts(batch, hashes, chains), full)
    return hashed_blocks, leading_hashes(hashes, hashes.starts, hashed_blocks, chains.factor)


def requested_tokens(batch: Batch) -> IntArray:
    most, generated = batch.numbers("max_tokens"), batch.numbers("output_tokens")
    if (generated == 0).any():
        streamed = np.where(np.isnan(batch.times("ttft_ms")), 0, batch.lengths("itl_ms") + 1)
        generated = np.where(generated == 0, streamed, generated)
    requested = np.where(generated == 0, most, generated)
    return np.where(batch.equal("status", "ok"), requested, np.maximum(np.maximum(most, generated), 1))


def _reached_engine(batch: Batch) -> BoolArray:
    answered = ~batch.equal("status", "error") | (batch.numbers("http_status") == 200)
    return np.asarray(batch.equal("status", "ok") | (~np.isnan(batch.times("e2e_ms")) & answered))


def parents_of(
    ids: Sequence[str],
    parent_ids: Sequence[str | None],
    arrival_ms: FloatArray,
    e2e_ms: FloatArray,
    think_ms: FloatArray,
) -> tuple[IntArray, FloatArray]:
    """Return the parent row and think time of each request; no parent if it arrived before the parent's end."""
    row_of = {name: row for row, name in enumerate(ids)}
    parents = np.array([NOBODY if name is None else row_of.get(name, NOBODY) for name in parent_ids], np.int64)
    think_ms = np.where(np.isnan(think_ms), arrival_ms - (arrival_ms + e2e_ms)[parents], think_ms)
    parents[~(think_ms >= 0.0) | (parents == np.arange(len(parents)))] = NOBODY
    think_ms[parents == NOBODY] = np.nan
    return parents, think_ms


def require_times(path: str | Path, ids: Sequence[str | None], arrival_ms: FloatArray) -> None:
    for row in np.flatnonzero(np.isnan(arrival_ms))[:1].tolist():
        raise InputError(f"{path}: request {ids[row]}: arrival_ms: missing; expected a time")
