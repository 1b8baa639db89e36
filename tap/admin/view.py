"""Snapshot of the state for the live page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from measure import wording
from measure.histogram import OVERHEAD_S, WAIT_S, HistogramCounts, quantile_bound
from tap.admin.health import reasons_against, reasons_not_recording
from tap.admin.state import KEPT_MINUTES, LiveState
from tap.ipc.feed import RecorderStats


class Fact(msgspec.Struct, frozen=True):
    """A named number of the recorder or the processes."""

    name: str
    value: str
    alarm: bool = False


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the first row, with its last minutes."""

    id: str
    title: str
    value: str
    detail: str
    line: list[float]
    """A value a second, oldest first; []: no line."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The page at one moment."""

    trace: str
    engine: str
    ready: bool
    """Ready to serve and to record."""
    status: str
    reasons: list[str]
    at: str
    """Wall clock, HH:MM:SS UTC."""
    tiles: list[Tile]
    recorder: list[Fact]
    processes: list[Fact]
    drops: list[Fact]


def snapshot(state: LiveState, now_s: float) -> Snapshot:
    unready, unrecorded = reasons_against(state), reasons_not_recording(state, now_s)
    return Snapshot(
        trace=Path(state.setup.trace).name,
        engine=engine_text(state),
        ready=not (unready or unrecorded),
        status="not ready" if unready else "not recording" if unrecorded else "ready",
        reasons=unready + unrecorded,
        at=datetime.now(UTC).strftime("%H:%M:%S UTC"),
        tiles=tiles(state),
        recorder=recorder_facts(state),
        processes=process_facts(state),
        drops=[Fact(reason, wording.count(count), True) for reason, count in sorted(state.dropped.items())],
    )


def engine_text(state: LiveState) -> str:
    engine = state.engine
    words = [" ".join(filter(None, (engine.name, engine.version)))]
    if engine.num_gpu_blocks and engine.block_size:
        words.append(f"cache of {wording.compact((engine.num_gpu_blocks - 1) * engine.block_size)} tokens")
    upstreams = [] if state.service is None else state.service.upstreams
    words.append(upstreams[0] if len(upstreams) == 1 else f"{len(upstreams)} upstreams" if upstreams else "")
    return " · ".join(filter(None, words))


def tiles(state: LiveState) -> list[Tile]:
    line, rate, total = state.timeline.line, state.timeline.rate, state.timeline.total
    workers = state.workers.values()
    queue, limit = sum(one.queue_bytes for one in workers), sum(one.queue_limit_bytes for one in workers)
    ttft = state.timeline.ttft()
    cached, prompt = total(lambda one: one.cached_tokens), total(lambda one: one.prompt_tokens)
    return [
        Tile(
            id="requests",
            title="Requests a second",
            value=wording.rate(rate(lambda one: one.requests)),
            detail=f"{wording.size(rate(lambda one: one.bytes_in))}/s in, "
            f"{wording.size(rate(lambda one: one.bytes_out))}/s out",
            line=line(lambda one: one.requests / one.span_s),
        ),
        Tile(
            id="in-flight",
            title="In flight",
            value=wording.count(sum(one.in_flight for one in workers)),
            detail=f"{wording.count(sum(one.connections for one in workers))} client connections",
            line=line(lambda one: one.in_flight),
        ),
        Tile(
            id="output",
            title="Output tokens a second",
            value=wording.rate(rate(lambda one: one.output_tokens)),
            detail=f"{wording.rate(rate(lambda one: one.prompt_tokens))} prompt tokens a second",
            line=line(lambda one: one.output_tokens / one.span_s),
        ),
        Tile(
            id="ttft",
            title="TTFT p50",
            value=_bound_text(WAIT_S, ttft, 0.5) if ttft.count else wording.NOTHING,
            detail=f"p90 {_bound_text(WAIT_S, ttft, 0.9)}, last {KEPT_MINUTES} minutes"
            if ttft.count
            else f"no first token in the last {KEPT_MINUTES} minutes",
            line=[],
        ),
        Tile(
            id="cached",
            title="Prompt tokens cached",
            value=wording.share_of(cached, prompt),
            detail=f"as the engine reports, last {KEPT_MINUTES} minutes" if cached else "the engine reports none",
            line=[],
        ),
        Tile(
            id="dropped",
            title="Records dropped",
            value=wording.count(sum(state.dropped.values())),
            detail=f"queue {wording.size(queue)}" + (f" of {wording.size(limit)}" if limit else ""),
            line=line(lambda one: one.dropped / one.span_s),
        ),
    ]


def recorder_facts(state: LiveState) -> list[Fact]:
    recorder = state.recorder
    if recorder is None:
        return []
    progress = recorder.progress
    unhashed = ", ".join(f"{reason} {wording.count(count)}" for reason, count in sorted(progress.unhashed.items()))
    matched, checked = progress.prompt_counts_matched, progress.prompt_counts_checked
    return [
        Fact("Recorded", wording.count(progress.recorded)),
        Fact("Sampled out", wording.count(progress.sampled_out)),
        Fact(
            "Hashed", wording.share_of(progress.hashed, progress.recorded) + (f" (not: {unhashed})" if unhashed else "")
        ),
        Fact("Prompt lengths as in usage", f"{wording.share_of(matched, checked)} of {wording.count(checked)}"),
        Fact("Writing", "yes" if recorder.writing else "no: the trace cannot be written", not recorder.writing),
        Fact("Segments", _segments_text(recorder), progress.upload_failed > 0),
    ]


def process_facts(state: LiveState) -> list[Fact]:
    facts = []
    service = state.service
    if service is not None:
        up, restarts = f"{service.workers_up} of {service.workers} up", _restarts_text(service.worker_restarts)
        facts.append(Fact("Workers", up + restarts, service.workers_up < service.workers))
        recorder = "up" if service.recorder_up else "down"
        facts.append(Fact("Recorder", recorder + _restarts_text(service.recorder_restarts), not service.recorder_up))
    facts += upstream_facts(state)
    workers = state.workers.values()
    if workers:
        facts.append(
            Fact("Event loop late by at most", wording.duration(1e3 * max(one.loop_delay_s for one in workers)))
        )
    return facts + _overhead_facts(state)


def upstream_facts(state: LiveState) -> list[Fact]:
    against = state.reasons_against_upstreams()
    facts = []
    for origin, reached in sorted(state.reachable.items()):
        stats = [one for worker in state.workers.values() for one in worker.upstreams if one.upstream == origin]
        words = ["takes connections" if reached else "does not take connections"]
        if stats:
            words.append(f"{wording.count(sum(one.in_flight for one in stats))} in flight")
            words.append(f"{wording.count(sum(one.requests for one in stats))} requests")
        if hashed := sum(one.prompt_bytes for one in stats):
            words.append(f"{wording.share_of(sum(one.known_bytes for one in stats), hashed)} of prompts' starts known")
        reason = against.get(origin)
        facts.append(Fact(origin, ", ".join(words + ([reason] if reason else [])), not reached or reason is not None))
    return facts


_OVERHEADS: Final = {
    "request_head": "Added to a request's head",
    "response_head": "Added to a response's head",
    "chunk": "Added to a read of a stream",
}


def _overhead_facts(state: LiveState) -> list[Fact]:
    parts = state.overheads()
    return [
        Fact(
            f"{title}, p50 · p99",
            f"{_bound_text(OVERHEAD_S, counts, 0.5)} · {_bound_text(OVERHEAD_S, counts, 0.99)}",
        )
        for part, title in _OVERHEADS.items()
        if (counts := parts.get(part)) is not None and counts.count
    ]


def _bound_text(bounds: Sequence[float], counts: HistogramCounts, level: float) -> str:
    bound_s = quantile_bound(bounds, counts, level)
    sign = "≤" if bound_s <= bounds[-1] else ">"
    return f"{sign} {wording.duration(1e3 * min(bound_s, bounds[-1]))}"


def _segments_text(recorder: RecorderStats) -> str:
    progress = recorder.progress
    text = wording.count(progress.segments)
    if progress.deleted:
        text += f", {wording.count(progress.deleted)} deleted"
    if progress.uploaded or progress.upload_failed:
        text += f", {wording.count(progress.uploaded)} uploaded"
    if progress.upload_failed:
        text += f", {wording.count(progress.upload_failed)} failed tries"
    return text


def _restarts_text(restarts: int) -> str:
    return f", restarted {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
