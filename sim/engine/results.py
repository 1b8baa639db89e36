"""Results of a simulated run as a trace: its header, and a record per request with predicted times."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from math import isnan
from typing import Any, NamedTuple

import msgspec
import numpy as np
from librt.vecs import vec

from sim.engine.gaptexts import DECIMALS, GapTexts
from sim.engine.simulatedrequest import (
    ABORTED,
    AS_RECORDED,
    LOST,
    NO_ENGINE,
    PARENT_FAILED,
    UNSERVABLE,
    SimulatedRequest,
)
from sim.latency.modelfile import Model, model_digest
from sim.vllm.config import EngineConfig
from sim.vllm.request import NOT_ADMITTED
from sim.workload.arrivals import Arrivals
from tracefile.commandline.parser import VERSION
from tracefile.records.arrays import IntArray
from tracefile.records.schema import Engine as EngineInfo
from tracefile.records.schema import Meta, Record, Workload


class RequestResult(NamedTuple):
    """A request that has ended, and what becomes its record."""

    request: SimulatedRequest
    record: Record
    """Record as in the trace; its receiver may change it."""
    number: int
    """Place in the whole workload."""
    think_ms: float
    """NaN: it did not wait for a parent's end."""
    itl_ms: msgspec.Raw
    """Rounded, as JSON."""


def results_of(
    requests: Sequence[SimulatedRequest], arrivals: Arrivals, places: IntArray, seen_ms: vec[float]
) -> Iterator[RequestResult]:
    """Yield the results of requests that have ended; ``places``: theirs in ``arrivals``; ``seen_ms``: of their engine's
    steps."""
    texts = GapTexts(seen_ms)
    columns = (arrivals.records(places), arrivals.numbers[places].tolist(), arrivals.think_ms[places].tolist())
    for request, record, number, think_ms in zip(requests, *columns, strict=True):
        request.close_run()
        yield RequestResult(request, record, number, think_ms, msgspec.Raw(texts.array(request.token_runs)))


def _rounded(time_ms: float) -> float | None:
    return None if isnan(time_ms) else round(time_ms, DECIMALS)


TOO_LONG = "exceeds_engine"
FAILURES = {UNSERVABLE: TOO_LONG, PARENT_FAILED: "parent_failed", NO_ENGINE: "no_engine"}
"""Errors of requests that no engine served, by outcome."""


def finished_records(results: Iterable[RequestResult], block_size: int, *, keep_hashes: bool = True) -> list[Record]:
    """Return the records in order of their ends, with the requests in flight at each arrival."""
    made = [(result, _predicted(result, block_size, keep_hashes=keep_hashes)) for result in results]
    made.sort(key=lambda each: (each[1].end_ms() or each[1].arrival_ms or 0.0, each[0].number))
    came_ms = np.array([result.request.arrival_ms for result, _ in made])
    went_ms = np.array([result.request.end_ms() for result, _ in made])
    arrived, gone = (np.searchsorted(np.sort(times), came_ms, side="right") for times in (came_ms, went_ms))
    for (_, record), count in zip(made, (arrived - gone).tolist(), strict=True):
        record.concurrency = max(1, count)
    return [record for _, record in made]


def _predicted(result: RequestResult, block_size: int, *, keep_hashes: bool) -> Record:
    request, record = result.request, result.record
    record.arrival_ms = round(request.arrival_ms, DECIMALS)
    record.scheduled_ms = record.first_byte_ms = record.ttft_ms = record.output_tokens = record.cached_tokens = None
    record.itl_ms, record.itl_tokens, record.extra = [], [], {}
    record.e2e_ms = _rounded(request.e2e_ms)
    if not isnan(result.think_ms):
        record.think_ms = result.think_ms
    if not keep_hashes:
        record.block_hashes = record.output_block_hashes = record.hash_source = None
    if request.outcome == AS_RECORDED:
        return record
    if request.has_arrived and request.outcome not in FAILURES:
        _set_run(record, request, result.itl_ms, block_size)
    else:
        record.status, record.error = "error", FAILURES[request.outcome]
        record.http_status = record.finish_reason = None
    return record


def _set_run(record: Record, request: SimulatedRequest, itl_ms: Any, block_size: int) -> None:
    tokens = int(request.num_seen)
    if request.outcome in (ABORTED, LOST):
        record.finish_reason = record.kv_blocks = None
        if request.outcome == LOST:
            record.status, record.http_status, record.error = "upstream_abort", 200, "engine_died"
    else:
        record.status, record.http_status, record.error = "ok", 200, None
        record.finish_reason = record.finish_reason or "length"
        record.kv_blocks = -(-(int(request.prompt_tokens) + tokens - 1) // block_size)
    if record.stream is not False and not isnan(request.ttft_ms):
        record.ttft_ms = round(request.ttft_ms, DECIMALS)
        if tokens > 1:
            ones: Any = _ones_text(tokens - 1)
            record.itl_ms, record.itl_tokens = itl_ms, ones
    record.output_tokens = tokens
    record.cached_tokens = None if request.cached_tokens == NOT_ADMITTED else int(request.cached_tokens)
    record.queue_ms = _rounded(request.admitted_ms - request.entry_ms)
    record.preemptions = int(request.preemptions)


@cache
def _ones_text(count: int) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b"1," * (count - 1) + b"1]")


def predicted_meta(
    meta: Meta,
    model: Model,
    engine: EngineConfig,
    digest: str,
    *,
    replay_sessions: bool,
    cold_prompts: bool,
    seed: int | None,
) -> Meta:
    """Header of a predicted trace: all that decided it. ``digest``: of the trace that was simulated."""
    return msgspec.structs.replace(
        meta,
        source="sim",
        model=meta.model or model.model_name,
        engine=EngineInfo(
            name="kvtape-sim",
            version=VERSION,
            block_size=engine.block_size,
            num_gpu_blocks=engine.num_gpu_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=engine.enable_prefix_caching,
            async_scheduling=engine.async_scheduling,
        ),
        workload=Workload(
            pattern="replay-sessions" if replay_sessions else "replay",
            seed=seed,
            cold_prompts=cold_prompts or None,
            source_digest=digest,
        ),
        extra={"model_digest": model_digest(model), "fit_digests": model.fit_digests, "settings": asdict(engine)},
    )
