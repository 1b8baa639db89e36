"""Requests on their way to an engine, as columns: the one place that reads a trace's fields for a simulated engine.

``BatchPlan`` turns a trace's batches into ``Arrivals``; ``plan_arrivals`` does so for records in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from measure.cache.chains import chain_places, leading_places
from sim.workload.chain import Chains, known_blocks
from tracefile.outputs import InferredOutputs, infer_outputs
from tracefile.records.arrays import BoolArray, FloatArray, IntArray, UInt64Array
from tracefile.records.batches import NO_LIST, Batch
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
    sources: tuple[Batch, ...]
    source: IntArray
    """Place in ``sources`` of the batch with its record."""
    rows: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: IntArray) -> Self:
        """Select ``places``, in that order; sources without a record among them are dropped."""
        starts = np.cumsum(self.known) - self.known
        needed = np.unique(self.source[places])
        columns: dict[str, Any] = {name: getattr(self, name)[places] for name in _COLUMNS}
        columns |= {
            "ids": list(map(self.ids.__getitem__, places.tolist())),
            "hashes": self.hashes[chain_places(starts[places], self.known[places])],
            "sources": tuple(self.sources[number] for number in needed.tolist()),
            "source": np.searchsorted(needed, self.source[places]),
        }
        return replace(self, **columns)

    def followed_by(self, *others: Self) -> Self:
        every = (self, *others)
        moved = np.cumsum([0, *(len(one.sources) for one in every)])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in every]) for name in (*_COLUMNS, "hashes")
        }
        columns |= {
            "ids": [name for one in every for name in one.ids],
            "sources": tuple(source for one in every for source in one.sources),
            "source": np.concatenate([one.source + by for one, by in zip(every, moved[:-1], strict=True)]),
        }
        return replace(self, **columns)

    def records(self, places: IntArray) -> Iterator[Record]:
        """Records at ``places``, for the caller to change."""
        for source, row in zip(self.source[places].tolist(), self.rows[places].tolist(), strict=True):
            yield self.sources[source].record(row)


_COLUMNS = [one.name for one in fields(Arrivals) if one.name not in ("ids", "hashes", "sources")]


@dataclass(slots=True)
class BatchPlan:
    """Turns a trace's batches into arrivals.

    An aborted request asks for all of ``max_tokens`` (where unknown, for the tokens that it got) and is aborted as long
    after its arrival as it was. A request that failed before a response began never reached the engine.
    """

    chains: Chains
    path: str | Path
    cold_prompts: bool = False
    inferred: InferredOutputs | None = None
    """Null: outputs without hashes stay so."""
    hashed: int = 0
    """Records so far that had hashes."""
    requests: int = 0

    def every(self, batches: Iterable[Batch]) -> Iterator[Arrivals]:
        """Arrivals of each batch, which forgets its tokens' times; numbers begin anew in each."""
        for batch in batches:
            arrivals = self.arrivals(batch)
            batch.forget_times()
            yield arrivals

    def arrivals(self, batch: Batch) -> Arrivals:
        """Arrivals without parents, in the trace's order. Raises InputError naming a record without a time."""
        ids = [name or "" for name in batch.words("request_id")]
        arrival_ms, e2e_ms = batch.times("arrival_ms"), batch.times("e2e_ms")
        require_times(self.path, ids, arrival_ms)
        prompt_tokens, output_tokens = batch.numbers("prompt_tokens"), asked_tokens(batch)
        runs = (prompt_tokens > 0) & (output_tokens > 0) & _reached_engine(batch)
        full = np.where(runs, (prompt_tokens + output_tokens - 1) // self.chains.block_size, 0)
        known, hashes = self._known(batch, full)
        count = len(batch)
        return Arrivals(
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
            sources=(batch,),
            source=np.zeros(count, np.int64),
            rows=np.arange(count),
        )

    def require_hashes(self) -> None:
        if not (self.hashed or self.cold_prompts):
            raise InputError(
                f"{self.path}: block_hashes: no record has any; expected a trace with them, or --cold-prompts"
            )

    def _known(self, batch: Batch, full: IntArray) -> tuple[IntArray, UInt64Array]:
        """Count the ``full`` blocks whose hashes the trace has, and return these hashes, request after request."""
        if self.cold_prompts:
            return np.zeros(len(batch), np.int64), np.empty(0, np.uint64)
        hashes = batch.hashes() if self.inferred is None else self.inferred.fill_hashes(batch, batch.hashes())
        self.hashed += int(np.count_nonzero(hashes.prompt_blocks != NO_LIST))
        self.requests += len(batch)
        known = np.minimum(known_blocks(batch, hashes, self.chains), full)
        if self.chains.factor == 1 and int(known.sum()) == len(hashes.values):
            return known, hashes.values
        return known, hashes.values[leading_places(hashes.starts, known, self.chains.factor)]


def plan_arrivals(
    meta: Meta,
    records: list[Record],
    block_size: int,
    *,
    path: str = "trace",
    cold_prompts: bool = False,
    replay_sessions: bool = False,
    needs_hashes: bool = True,
) -> Arrivals:
    """Turn records into arrivals, in their order. Raises InputError naming the record that cannot be simulated."""
    batch, plan = Batch(records), BatchPlan(Chains(meta, block_size), path, cold_prompts)
    plan.inferred = None if cold_prompts else infer_outputs(meta, records)
    arrivals = plan.arrivals(batch)
    if needs_hashes:
        plan.require_hashes()
    if not replay_sessions:
        return arrivals
    parents, think_ms = parents_of(
        arrivals.ids, batch.words("parent_id"), arrivals.arrival_ms, arrivals.recorded_e2e_ms, batch.times("think_ms")
    )
    return replace(arrivals, parents=parents, think_ms=think_ms)


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
    places = {name: place for place, name in enumerate(ids)}
    parents = np.array([NOBODY if name is None else places.get(name, NOBODY) for name in parent_ids], np.int64)
    think_ms = np.where(np.isnan(think_ms), arrival_ms - (arrival_ms + e2e_ms)[parents], think_ms)
    parents[~(think_ms >= 0.0) | (parents == np.arange(len(parents)))] = NOBODY
    think_ms[parents == NOBODY] = np.nan
    return parents, think_ms


def require_times(path: str | Path, ids: Sequence[str | None], arrival_ms: FloatArray) -> None:
    for place in np.flatnonzero(np.isnan(arrival_ms))[:1].tolist():
        raise InputError(f"{path}: request {ids[place]}: arrival_ms: missing; expected a time")
