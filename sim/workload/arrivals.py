"""Requests on their way to an engine, as columns: the one place that reads a trace's fields for a simulated engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from measure.cache.chains import chain_places
from sim.workload.chain import Chains, known_blocks, leading_hashes
from tracefile.outputs import InferredOutputs, infer_outputs
from tracefile.records.arrays import BoolArray, FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch
from tracefile.records.decoding import RecordColumns
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests as the engine's clients send them, in the order of handing over; each column but ``hashes`` has an entry
    per request."""

    ids: list[str]
    numbers: IntArray
    """Places in the whole workload, ascending."""
    arrival_ms: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    runs: BoolArray
    prompt_logprobs: IntArray
    """1: it is never looked up in the prefix cache; 0: it is."""
    abort_after_ms: FloatArray
    """Time after its arrival at which the client aborts it. NaN: never."""
    recorded_e2e_ms: FloatArray
    parents: IntArray
    """Number of the request whose end it waits for; NOBODY: none, or its parent has ended."""
    think_ms: FloatArray
    """From its parent's end to its arrival; NaN: it has no parent."""
    full_blocks: IntArray
    """Blocks that get full, at least."""
    known: IntArray
    """Leading full blocks whose hash the trace has."""
    hashes: UInt64Array
    """Hashes of the known blocks, request after request."""
    batch: Batch
    rows: IntArray
    """Row of each request's record in ``batch``."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: IntArray) -> Self:
        """Select ``rows``, in that order."""
        starts = np.cumsum(self.known) - self.known
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        columns |= {
            "ids": list(map(self.ids.__getitem__, rows.tolist())),
            "hashes": self.hashes[chain_places(starts[rows], self.known[rows])],
        }
        return replace(self, **columns)

    def column(self, name: str) -> list[Any]:
        """Return a field of every request's record."""
        column = self.batch.column(name)
        return [column[row] for row in self.rows.tolist()]

    def records(self, rows: IntArray) -> Iterator[Record]:
        """Records at ``rows``, for the caller to change."""
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
    """Turn records into arrivals, in their order. Raises InputError naming the record that cannot be simulated.

    An aborted request asks for all of ``max_tokens`` (where unknown, for the tokens that it got) and is aborted as long
    after its arrival as it was. A request that failed before a response began never reached the engine.
    """
    batch, chains, count = Batch(records), Chains(meta, block_size), len(records)
    ids = [name or "" for name in batch.column("request_id")]
    arrival_ms, e2e_ms = batch.times("arrival_ms"), batch.times("e2e_ms")
    require_times(path, ids, arrival_ms)
    prompt_tokens, output_tokens = batch.numbers("prompt_tokens"), asked_tokens(batch)
    runs = (prompt_tokens > 0) & (output_tokens > 0) & _reached_engine(batch)
    full = np.where(runs, (prompt_tokens + output_tokens - 1) // chains.block_size, 0)
    known, hashes = np.zeros(count, np.int64), np.empty(0, np.uint64)
    if not cold_prompts:
        known, hashes = _known(batch, infer_outputs(meta, records), chains, full)
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
        known=known,
        hashes=hashes,
        batch=batch,
        rows=np.arange(count),
    )
    if not replay_sessions:
        return arrivals
    parents, think_ms = parents_of(ids, batch.column("parent_id"), arrival_ms, e2e_ms, batch.times("think_ms"))
    return replace(arrivals, parents=parents, think_ms=think_ms)


def _known(batch: Batch, inferred: InferredOutputs, chains: Chains, full: IntArray) -> tuple[IntArray, UInt64Array]:
    """Count the ``full`` blocks whose hashes the trace has, and return these hashes, request after request."""
    hashes = inferred.fill_hashes(batch, batch.hashes())
    known = np.minimum(known_blocks(batch, hashes, chains), full)
    return known, leading_hashes(hashes, hashes.starts, known, chains.factor)


def asked_tokens(batch: Batch) -> IntArray:
    most, seen = batch.numbers("max_tokens"), batch.numbers("output_tokens")
    if (seen == 0).any():
        streamed = np.where(np.isnan(batch.times("ttft_ms")), 0, batch.lengths("itl_ms") + 1)
        seen = np.where(seen == 0, streamed, seen)
    asked = np.where(seen == 0, most, seen)
    return np.where(batch.equal("status", "ok"), asked, np.maximum(np.maximum(most, seen), 1))


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
    """Places of the requests' parents and think times; a request that came before its parent's end has no parent."""
    row_of = {name: row for row, name in enumerate(ids)}
    parents = np.array([NOBODY if name is None else row_of.get(name, NOBODY) for name in parent_ids], np.int64)
    think_ms = np.where(np.isnan(think_ms), arrival_ms - (arrival_ms + e2e_ms)[parents], think_ms)
    parents[~(think_ms >= 0.0) | (parents == np.arange(len(parents)))] = NOBODY
    think_ms[parents == NOBODY] = np.nan
    return parents, think_ms


def require_times(path: str | Path, ids: Sequence[str | None], arrival_ms: FloatArray) -> None:
    for row in np.flatnonzero(np.isnan(arrival_ms))[:1].tolist():
        raise InputError(f"{path}: request {ids[row]}: arrival_ms: missing; expected a time")
