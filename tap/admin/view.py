"""Snapshot of the state for the live page."""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from measure import cohorts, wording
from measure.cohorts import MAIN
from measure.histogram import OVERHEAD_S, HistogramCounts, quantile_bound
from tap.admin.cachecurve import SIZES
from tap.admin.health import reasons_against, reasons_not_recording
from tap.admin.state import LiveState
from tap.admin.survival import LEVELS, MIN_JUDGED, Survival
from tap.admin.timeline import WINDOW_MINUTES
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


class QuantileText(msgspec.Struct, frozen=True):
    """A quantile of one cohort."""

    level: str
    text: str
    """``> x`` where the curve does not reach the level."""


class CohortCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The TTFT survival of one cohort."""

    cohort: str
    title: str
    n: int
    count: str
    """n and the censored share, in words."""
    judged: bool
    """False: too few requests; the curve is empty."""
    quantiles: list[QuantileText]
    times_ms: list[float]
    waiting: list[float]
    low: list[float]
    high: list[float]
    until_ms: float
    """End of the known curve."""


class HitCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Share of prompt tokens that a prefix cache of each size would hold."""

    requests: int
    sentence: str
    note: str
    tokens: list[int]
    hit_share: list[float]
    exact_tokens: int
    """Exact up to this size, estimated from a sample of blocks beyond."""
    engine_tokens: int | None
    """Size of the engine's cache. Null: unknown."""
    engine_share: float | None
    """Share on the curve at that size."""
    measured_share: float | None
    """Share that the engine reported. Null: not reported."""


class PrefixRow(msgspec.Struct, frozen=True):
    """A shared prefix."""

    hash: str
    depth: str
    requests: str
    share: str
    bar: float


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
    minutes: int
    tiles: list[Tile]
    by_turn: list[CohortCurve]
    by_uncached: list[CohortCurve]
    hit_curve: HitCurve
    prefixes: list[PrefixRow]
    recorder: list[Fact]
    processes: list[Fact]
    drops: list[Fact]


def snapshot(state: LiveState, now_s: float) -> Snapshot:
    curves = state.survival.recent(now_s)
    unready, unrecorded = reasons_against(state), reasons_not_recording(state, now_s)
    return Snapshot(
        trace=Path(state.setup.trace).name,
        engine=engine_text(state),
        ready=not (unready or unrecorded),
        status="not ready" if unready else "not recording" if unrecorded else "ready",
        reasons=unready + unrecorded,
        at=datetime.now(UTC).strftime("%H:%M:%S UTC"),
        minutes=WINDOW_MINUTES,
        tiles=tiles(state, curves, now_s),
        by_turn=[cohort(name, curves[name]) for name in MAIN if name in curves],
        by_uncached=[cohort(name, curve) for name, curve in curves.items() if name.startswith("uncached:")],
        hit_curve=hit_curve_view(state, now_s),
        prefixes=prefixes(state, now_s),
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


def tiles(state: LiveState, curves: dict[str, Survival], now_s: float) -> list[Tile]:
    line, rate = state.timeline.line, state.timeline.rate
    workers = state.workers.values()
    queue, limit = sum(one.queue_bytes for one in workers), sum(one.queue_limit_bytes for one in workers)
    hits = state.curve.recent(now_s)
    everything = curves.get("all")
    median, late = (None, None) if everything is None else everything.quantiles_ms[:2]
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
            value=wording.NOTHING if median is None else wording.duration(median),
            detail="no first token seen yet" if everything is None else f"p90 {_quantile_text(everything, late)}",
            line=[],
        ),
        Tile(
            id="cached",
            title="Prompt tokens cached",
            value=wording.share_of(hits.cached_tokens, hits.reported_tokens),
            detail="as the engine reports" if hits.reported_tokens else "the engine reports none",
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


def cohort(name: str, curve: Survival) -> CohortCurve:
    judged = curve.n >= MIN_JUDGED
    return CohortCurve(
        cohort=name,
        title=cohort_title(name),
        n=curve.n,
        count=_count_text(curve),
        judged=judged,
        quantiles=[
            QuantileText(f"p{level * 100:.0f}", _quantile_text(curve, at) if judged else wording.NOTHING)
            for level, at in zip(LEVELS, curve.quantiles_ms, strict=True)
        ],
        times_ms=_rounded(curve.times_ms, 3) if judged else [],
        waiting=_rounded(curve.waiting, 5) if judged else [],
        low=_rounded(curve.low, 5) if judged else [],
        high=_rounded(curve.high, 5) if judged else [],
        until_ms=round(curve.known_until_ms, 3),
    )


def cohort_title(name: str) -> str:
    if name in MAIN:
        return cohorts.cohort_title(name)
    low, dash, high = name.removeprefix("uncached:").partition("-")
    return f"{int(low):,}–{int(high):,}" if dash else f"{int(low.rstrip('+')):,}+"


def prefixes(state: LiveState, now_s: float) -> list[PrefixRow]:
    whole = state.curve.recent(now_s).prompt_tokens
    rows = []
    for prefix in state.prefixes.top(now_s):
        tokens = prefix.blocks * state.setup.block_size
        part = min(tokens * prefix.requests, whole)
        rows.append(
            PrefixRow(
                f"{prefix.hash & (2**64 - 1):016x}",
                wording.count(tokens),
                wording.count(prefix.requests),
                wording.share_of(part, whole),
                round(part / whole, 5) if whole else 0.0,
            )
        )
    return rows


def _count_text(curve: Survival) -> str:
    words = [f"{wording.count(curve.n)} request{'s' if curve.n != 1 else ''}"]
    if curve.censored:
        words.append(f"{wording.share_of(curve.censored, curve.n)} censored")
    if curve.failed:
        words.append(f"{wording.share_of(curve.failed, curve.n)} failed")
    if curve.n < MIN_JUDGED:
        words.append(f"under {MIN_JUDGED}: not judged")
    return ", ".join(words)


def _quantile_text(curve: Survival, at_ms: float | None) -> str:
    return f"> {wording.duration(curve.known_until_ms)}" if at_ms is None else wording.duration(at_ms)


def _rounded(values: Sequence[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]


_LEAST_BLOCKS: Final = 16
_BEYOND_ENGINE: Final = 1.6


def hit_curve_view(state: LiveState, now_s: float) -> HitCurve:
    curve, block_size = state.curve, state.setup.block_size
    counts = curve.recent(now_s)
    hit_tokens = [block_size * blocks for blocks in counts.up_to_size()]
    whole = max(counts.prompt_tokens, 1)
    engine_blocks = _engine_blocks(state)
    last = bisect_left(hit_tokens, hit_tokens[-1]) + 4
    if engine_blocks is not None:
        last = max(last, bisect_left(SIZES, _BEYOND_ENGINE * engine_blocks))
    drawn = slice(bisect_left(SIZES, _LEAST_BLOCKS), min(last, bisect_left(SIZES, curve.deepest)) + 1)
    engine_share = None if engine_blocks is None else _hits_at(hit_tokens, engine_blocks) / whole
    measured = counts.cached_tokens / counts.reported_tokens if counts.reported_tokens else None
    return HitCurve(
        requests=counts.requests,
        sentence=_hit_sentence(hit_tokens[-1] / whole, engine_share, measured, counts.requests),
        note=_hit_note(state),
        tokens=[size * block_size for size in SIZES[drawn]] if counts.requests else [],
        hit_share=[round(tokens / whole, 5) for tokens in hit_tokens[drawn]] if counts.requests else [],
        exact_tokens=curve.exact_blocks * block_size,
        engine_tokens=None if engine_blocks is None else int(engine_blocks * block_size),
        engine_share=None if engine_share is None else round(engine_share, 5),
        measured_share=None if measured is None else round(measured, 5),
    )


def _engine_blocks(state: LiveState) -> float | None:
    """Return the engine's usable cache in blocks of the trace's size: less one block, vLLM's null block."""
    engine = state.engine
    if not engine.num_gpu_blocks or engine.num_gpu_blocks < 2:
        return None
    return (engine.num_gpu_blocks - 1) * (engine.block_size or state.setup.block_size) / state.setup.block_size


def _hits_at(hit_tokens: Sequence[float], blocks: float) -> float:
    """Return the hits at any size, interpolated linearly between the sizes counted."""
    place = bisect_left(SIZES, blocks)
    if place == len(SIZES):
        return hit_tokens[-1]
    if place == 0 or SIZES[place] == blocks:
        return hit_tokens[place]
    part = (blocks - SIZES[place - 1]) / (SIZES[place] - SIZES[place - 1])
    return hit_tokens[place - 1] + part * (hit_tokens[place] - hit_tokens[place - 1])


def _hit_sentence(unlimited: float, at_engine: float | None, measured: float | None, requests: int) -> str:
    if not requests:
        return "No request with block hashes in the last minutes."
    words = [f"An unlimited cache would hold {100 * unlimited:.1f} % of recent prompt tokens"]
    if at_engine is not None:
        words.append(f"one of the engine's size {100 * at_engine:.1f} %")
    if measured is not None:
        words.append(f"the engine reports {100 * measured:.1f} %")
    return "; ".join(words) + "."


def _hit_note(state: LiveState) -> str:
    several = state.service is not None and len(state.service.upstreams) > 1
    shared = " The curve is for one cache shared by all upstreams." if several else ""
    policy = "LRU over full blocks of prompts and outputs, requests in the order of their ends; outputs without token "
    policy += "ids are left out, and the engine may hit more there."
    return f"{policy}{shared}{_skipped_text(state)}"


def _skipped_text(state: LiveState) -> str:
    skipped = 0 if state.recorder is None else state.recorder.feed_skipped
    seen = state.records_seen / (state.records_seen + skipped) if skipped else 1.0
    return f" Only {100 * seen:.0f} % of records were seen: the true share is higher." if seen < 0.995 else ""


def recorder_facts(state: LiveState) -> list[Fact]:
    recorder = state.recorder
    if recorder is None:
        return []
    progress = recorder.progress
    unhashed = ", ".join(f"{reason} {wording.count(count)}" for reason, count in sorted(progress.unhashed.items()))
    matched, checked = progress.prompt_counts_matched, progress.prompt_counts_checked
    facts = [
        Fact("Recorded", wording.count(progress.recorded)),
        Fact("Sampled out", wording.count(progress.sampled_out)),
        Fact(
            "Hashed", wording.share_of(progress.hashed, progress.recorded) + (f" (not: {unhashed})" if unhashed else "")
        ),
        Fact("Prompt lengths as in usage", f"{wording.share_of(matched, checked)} of {wording.count(checked)}"),
        Fact("Writing", "yes" if recorder.writing else "no: the trace cannot be written", not recorder.writing),
        Fact("Segments", _segments_text(recorder), progress.upload_failed > 0),
    ]
    if recorder.feed_skipped:
        facts.append(Fact("Not shown on this page", f"{wording.count(recorder.feed_skipped)} records"))
    return facts


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
        Fact(f"{title}, p50 · p99", f"≤ {_bound_text(counts, 0.5)} · ≤ {_bound_text(counts, 0.99)}")
        for part, title in _OVERHEADS.items()
        if (counts := parts.get(part)) is not None and counts.count
    ]


def _bound_text(counts: HistogramCounts, level: float) -> str:
    bound_s = quantile_bound(OVERHEAD_S, counts, level)
    if bound_s <= OVERHEAD_S[-1]:
        return wording.duration(1e3 * bound_s)
    return f"more than {wording.duration(1e3 * OVERHEAD_S[-1])}"


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
