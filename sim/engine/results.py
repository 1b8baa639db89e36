"""Results of a simulated run as a trace: its header, and a record per request with predicted times."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import isnan
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel
from sim.engine.gaptexts import DECIMALS, GapTexts
from sim.engine.simulatedrequest import OUTCOMES, SimulatedRequest
from sim.kernels import layout
from sim.kernels.layout import Places, SimState
from sim.latency.modelfile import Model, model_digest
from sim.vllm.config import EngineConfig
from sim.vllm.onerequest import NOT_ADMITTED
from sim.workload.arrivals import Arrivals
from tracefile.commandline.parser import VERSION
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.schema import Engine as EngineInfo
from tracefile.records.schema import Meta, Record, Workload

MOST_DIGITS = 22
"""Most bytes of one gap, its comma included."""
_GAPS_AT_ONCE = 1 << 18
_ZERO, _POINT, _COMMA, _OPEN, _CLOSE = (np.uint8(ord(letter)) for letter in "0.,[]")

_OUTCOMES = [outcome or "" for outcome in layout.OUTCOMES]

ByteArray = npt.NDArray[np.uint8]
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
    requests: Sequence[SimulatedRequest], arrivals: Arrivals, places: IntArray, seen_ms: FloatArray
) -> Iterator[RequestResult]:
    """Yield the results of requests that have ended; ``places``: theirs in ``arrivals``; ``seen_ms``: of their engine's
    steps."""
    texts = GapTexts(seen_ms)
    think_ms = _or_none(arrivals.think_ms[places])
    for request, record, think in zip(requests, arrivals.records(places), think_ms, strict=True):
        request.close_run()
        yield RequestResult(
            record,
            request.index,
            think,
            request.prompt_tokens,
            OUTCOMES[request.outcome],
            request.arrival_ms,
            _known(request.ttft_ms),
            texts.array(list(request.token_runs)),
            request.num_seen,
            _known(request.e2e_ms),
            request.has_arrived,
            None if request.cached_tokens == NOT_ADMITTED else request.cached_tokens,
            _known(request.admitted_ms - request.entry_ms),
            request.preemptions,
        )


def _known(time_ms: float) -> float | None:
    return None if isnan(time_ms) else time_ms


def results_in(state: SimState, arrivals: Arrivals, places: IntArray) -> Iterator[RequestResult]:
    """Yield the results of the requests at ``places``, which have all ended; a few thousand are made at once."""
    counts = np.maximum(state.runs["num_seen"][places] - 1, 0)
    cuts = np.searchsorted(np.cumsum(counts), np.arange(_GAPS_AT_ONCE, int(counts.sum()), _GAPS_AT_ONCE))
    for some in np.split(places, np.unique(cuts)):
        yield from _results(state, arrivals, some)


def _results(state: SimState, arrivals: Arrivals, places: IntArray) -> Iterator[RequestResult]:
    runs, requests = state.runs[places], state.scheduler.requests[places]
    return map(
        RequestResult,
        arrivals.records(places),
        arrivals.numbers[places].tolist(),
        _or_none(arrivals.think_ms[places]),
        arrivals.prompt_tokens[places].tolist(),
        map(_OUTCOMES.__getitem__, runs["outcome"].tolist()),
        runs["arrival_ms"].tolist(),
        _or_none(runs["ttft_ms"]),
        _gap_texts(state, places),
        runs["num_seen"].tolist(),
        _or_none(runs["e2e_ms"]),
        (requests["state"] != layout.ABSENT).tolist(),
        [None if tokens < 0 else tokens for tokens in requests["cached_tokens"].tolist()],
        _or_none(runs["admitted_ms"] - runs["entry_ms"]),
        requests["preemptions"].tolist(),
    )


def _gap_texts(state: SimState, places: IntArray) -> Iterator[msgspec.Raw]:
    counts = np.maximum(state.runs["num_seen"][places] - 1, 0)
    text = np.empty(int(counts.sum()) * MOST_DIGITS + 2 * len(places), np.uint8)
    ends = np.empty(len(places), np.int64)
    write_arrays(state.itl_ms, state.runs["first_token"][places] + 1, counts, text, ends)
    view, start = memoryview(text.data), 0
    for end in ends.tolist():
        yield msgspec.Raw(view[start:end])
        start = end


@entry
def write_arrays(values: FloatArray, firsts: Places, counts: Places, into: ByteArray, ends: Places) -> None:
    """Write JSON arrays of ``values`` of 0 and more to four decimals: array i has ``counts[i]`` from ``firsts[i]`` on.

    ``ends``: end of each array in ``into``. Digits are those of the shortest equal number, as always in JSON.
    """
    end = 0
    for number in range(len(firsts)):
        into[end] = _OPEN
        end += 1
        for place in range(firsts[number], firsts[number] + counts[number]):
            if place > firsts[number]:
                into[end] = _COMMA
                end += 1
            end = _write(into, end, int(np.rint(values[place] * 10_000.0)))
        into[end] = _CLOSE
        end += 1
        ends[number] = end


@kernel
def _write(into: ByteArray, end: int, parts: int) -> int:
    whole = parts // 10_000
    rest = parts - whole * 10_000
    digits, left = 1, whole // 10
    while left > 0:
        digits += 1
        left //= 10
    for place in range(end + digits - 1, end - 1, -1):
        tenth = whole // 10
        into[place] = _ZERO + np.uint8(whole - 10 * tenth)
        whole = tenth
    end += digits
    into[end] = _POINT
    end += 1
    scale = 1_000
    while True:
        digit = rest // scale
        into[end] = _ZERO + np.uint8(digit)
        end += 1
        rest -= digit * scale
        if rest == 0:
            return end
        scale //= 10


def _or_none(times_ms: FloatArray) -> list[float | None]:
    known: list[float | None] = times_ms.tolist()
    for place in np.flatnonzero(np.isnan(times_ms)).tolist():
        known[place] = None
    return known


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
