"""Results of a simulated run as a trace: its header, and a record per request with predicted times."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import isnan
from typing import Any

import msgspec
import numpy as np
from librt.vecs import vec

from sim.engine.gaptexts import DECIMALS, GapTexts
from sim.engine.simulatedrequest import OUTCOMES, SimulatedRequest
from sim.latency.modelfile import Model, model_digest
from sim.vllm.config import EngineConfig
from sim.vllm.request import NOT_ADMITTED
from sim.workload.arrivals import Arrivals
from tracefile.commandline.parser import VERSION
from tracefile.records.arrays import IntArray
from tracefile.records.schema import Engine as EngineInfo
from tracefile.records.schema import Meta, Record, Workload

Gaps = list[float] | msgspec.Raw


@dataclass(slots=True)
class RequestResult:
    """Result of one request. Times in ms, not rounded but for ``itl_ms``."""

    record: Record
    """Record as in the trace; its receiver may change it."""
    number: int
    think_ms: float | None
    """None: it did not wait for a parent's end."""
    prompt_tokens: int
    outcome: str
    arrival_ms: float
    ttft_ms: float | None
    itl_ms: Gaps
    """Rounded; as JSON if it is only written."""
    output_tokens: int
    e2e_ms: float | None
    reached: bool
    """An engine got the request, maybe one that died before its first token."""
    cached_tokens: int | None
    queue_ms: float | None
    """Time in the scheduler's queue before the first step that served it."""
    preemptions: int


def results_of(
    requests: Sequence[SimulatedRequest], arrivals: Arrivals, places: IntArray, seen_ms: vec[float]
) -> Iterator[RequestResult]:
    """Yield the results of requests that have ended; ``places``: theirs in ``arrivals``; ``seen_ms``: of their engine's
    steps."""
    texts = GapTexts(seen_ms)
    columns = (
        arrivals.records(places),
        arrivals.numbers[places].tolist(),
        map(_known, arrivals.think_ms[places].tolist()),
    )
    for request, record, number, think in zip(requests, *columns, strict=True):
        request.close_run()
        yield RequestResult(
            record,
            number,
            think,
            request.prompt_tokens,
            OUTCOMES[request.outcome],
            request.arrival_ms,
            _known(request.ttft_ms),
            msgspec.Raw(texts.array(request.token_runs)),
            request.num_seen,
            _known(request.e2e_ms),
            request.has_arrived,
            None if request.cached_tokens == NOT_ADMITTED else request.cached_tokens,
            _known(request.admitted_ms - request.entry_ms),
            request.preemptions,
        )


def _known(time_ms: float) -> float | None:
    return None if isnan(time_ms) else time_ms


FAILURES = {"unservable": "exceeds_engine", "parent_failed": "parent_failed", "no_engine": "no_engine"}


def finished_records(results: Iterable[RequestResult], block_size: int, *, keep_hashes: bool = True) -> list[Record]:
    """Return the records in order of their ends, with the requests in flight at each arrival."""
    made = [(result, _predicted(result, block_size, keep_hashes=keep_hashes)) for result in results]
    made.sort(key=lambda each: (each[1].end_ms() or each[1].arrival_ms or 0.0, each[0].number))
    came_ms = np.array([result.arrival_ms for result, _ in made])
    went_ms = came_ms + np.array([result.e2e_ms or 0.0 for result, _ in made])
    arrived, gone = (np.searchsorted(np.sort(times), came_ms, side="right") for times in (came_ms, went_ms))
    for (_, record), count in zip(made, (arrived - gone).tolist(), strict=True):
        record.concurrency = max(1, count)
    return [record for _, record in made]


def _predicted(result: RequestResult, block_size: int, *, keep_hashes: bool) -> Record:
    record = result.record
    record.arrival_ms = round(result.arrival_ms, DECIMALS)
    record.scheduled_ms = record.first_byte_ms = record.ttft_ms = record.output_tokens = record.cached_tokens = None
    record.itl_ms, record.itl_tokens, record.extra = [], [], {}
    record.e2e_ms = None if result.e2e_ms is None else round(result.e2e_ms, DECIMALS)
    if result.think_ms is not None:
        record.think_ms = result.think_ms
    if not keep_hashes:
        record.block_hashes = record.output_block_hashes = record.hash_source = None
    if result.outcome == "as_recorded":
        return record
    if result.reached and result.outcome not in FAILURES:
        _set_run(record, result, block_size)
    else:
        record.status, record.error = "error", FAILURES[result.outcome]
        record.http_status = record.finish_reason = None
    return record


def _set_run(record: Record, result: RequestResult, block_size: int) -> None:
    tokens = result.output_tokens
    if result.outcome in ("aborted", "lost"):
        record.finish_reason = record.kv_blocks = None
        if result.outcome == "lost":
            record.status, record.http_status, record.error = "upstream_abort", 200, "engine_died"
    else:
        record.status, record.http_status, record.error = "ok", 200, None
        record.finish_reason = record.finish_reason or "length"
        record.kv_blocks = -(-(result.prompt_tokens + tokens - 1) // block_size)
    if record.stream is not False and result.ttft_ms is not None:
        record.ttft_ms = round(result.ttft_ms, DECIMALS)
        if tokens > 1:
            gaps: Any = result.itl_ms
            ones: Any = [1] * (tokens - 1) if isinstance(gaps, list) else _ones_text(tokens - 1)
            record.itl_ms, record.itl_tokens = gaps, ones
    record.output_tokens, record.cached_tokens = tokens, result.cached_tokens
    record.queue_ms = None if result.queue_ms is None else round(result.queue_ms, DECIMALS)
    record.preemptions = result.preemptions


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
