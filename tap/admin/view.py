"""Snapshot of the tap's state for the live page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from measure import wording
from measure.histogram import OVERHEAD_S, WAIT_S, HistogramCounts, quantile_bound
from tap.admin.state import KEPT_MINUTES, LiveState
from tap.ipc.messages import Progress, TapStats


class Fact(msgspec.Struct, frozen=True):
    """A named number of the recorder or the processes."""

    name: str
    value: str
    alarm: bool = False


class Tile(msgspec.Struct, frozen=True):
    """A number of the first row, with its last minutes."""

    title: str
    value: str
    detail: str
    line: list[float] = []
    """A value a second, oldest first; []: no line."""
    alarm: bool = False


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


def snapshot(state: LiveState) -> Snapshot:
    unready, unrecorded = state.reasons_against(), state.reasons_not_recording()
    stats = state.stats or TapStats(upstreams=[], workers=0)
    return Snapshot(
        trace=Path(state.setup.trace).name,
        engine=engine_text(stats),
        ready=not (unready or unrecorded),
        status="not ready" if unready else "not recording" if unrecorded else "ready",
        reasons=unready + unrecorded,
        at=datetime.now(UTC).strftime("%H:%M:%S UTC"),
        tiles=tiles(state, stats),
        recorder=recorder_facts(stats.progress),
        processes=process_facts(state, stats),
        drops=[Fact(reason, wording.count(count), True) for reason, count in sorted(stats.dropped.items())],
    )


def engine_text(stats: TapStats) -> str:
    engine, upstreams = stats.engine, stats.upstreams
    words = [] if engine is None else [" ".join(filter(None, (engine.name, engine.version)))]
    if engine is not None and engine.num_gpu_blocks and engine.block_size:
        words.append(f"cache of {wording.compact((engine.num_gpu_blocks - 1) * engine.block_size)} tokens")
    words.append(upstreams[0] if len(upstreams) == 1 else f"{len(upstreams)} upstreams" if upstreams else "")
    return " · ".join(filter(None, words))


def tiles(state: LiveState, stats: TapStats) -> list[Tile]:
    workers, line = stats.worker_stats, state.line

    def rate(name: str) -> str:
        return wording.rate(state.rate(name))

    traffic = f"{wording.size(state.rate('bytes_in'))}/s in, {wording.size(state.rate('bytes_out'))}/s out"
    connections = wording.count(sum(one.connections for one in workers))
    cached, prompt = state.growth("cached_tokens"), state.growth("prompt_tokens")
    queue, limit = sum(one.queue_bytes for one in workers), sum(one.queue_limit_bytes for one in workers)
    waiting = f"queue {wording.size(queue)}" + (f" of {wording.size(limit)}" if limit else "")
    dropped = sum(stats.dropped.values())
    return [
        Tile("Requests a second", rate("requests"), traffic, line("requests")),
        Tile(
            "In flight",
            wording.count(sum(one.in_flight for one in workers)),
            f"{connections} client connections",
            state.levels(),
        ),
        Tile(
            "Output tokens a second",
            rate("output_tokens"),
            f"{rate('prompt_tokens')} prompt tokens a second",
            line("output_tokens"),
        ),
        _ttft_tile(state.ttft()),
        Tile(
            "Prompt tokens cached",
            wording.share_of(cached, prompt),
            f"as the engine reports, last {KEPT_MINUTES} minutes" if cached else "the engine reports none",
        ),
        Tile("Records dropped", wording.count(dropped), waiting, line("dropped"), dropped > 0),
    ]


def _ttft_tile(ttft: HistogramCounts) -> Tile:
    if not ttft.count:
        return Tile("TTFT p50", "–", f"no first token in the last {KEPT_MINUTES} minutes")
    p90 = f"p90 {_bound_text(WAIT_S, ttft, 0.9)}, last {KEPT_MINUTES} minutes"
    return Tile("TTFT p50", _bound_text(WAIT_S, ttft, 0.5), p90)


def recorder_facts(progress: Progress) -> list[Fact]:
    unhashed = ", ".join(f"{reason} {wording.count(count)}" for reason, count in sorted(progress.unhashed.items()))
    hashed = wording.share_of(progress.hashed, progress.recorded) + (f" (not: {unhashed})" if unhashed else "")
    matched, checked = progress.prompt_counts_matched, progress.prompt_counts_checked
    segments = [wording.count(progress.segments)]
    for count, words in (
        (progress.deleted, "deleted"),
        (progress.uploaded, "uploaded"),
        (progress.upload_failed, "failed tries"),
    ):
        segments += [f"{wording.count(count)} {words}"] if count else []
    return [
        Fact("Recorded", wording.count(progress.recorded)),
        Fact("Hashed", hashed),
        Fact("Prompt lengths as in usage", f"{wording.share_of(matched, checked)} of {wording.count(checked)}"),
        Fact("Writing", "yes" if progress.writing else "no: the trace cannot be written", not progress.writing),
        Fact("Segments", ", ".join(segments), progress.upload_failed > 0),
    ]


def process_facts(state: LiveState, stats: TapStats) -> list[Fact]:
    workers = f"{stats.workers_up} of {stats.workers} up" + _restarts_text(stats.worker_restarts)
    recorder = ("up" if stats.recorder_up else "down") + _restarts_text(stats.recorder_restarts)
    facts = [
        Fact("Workers", workers, stats.workers_up < stats.workers),
        Fact("Recorder", recorder, not stats.recorder_up),
        *upstream_facts(state, stats),
    ]
    if stats.worker_stats:
        delay_ms = 1e3 * max(one.loop_delay_s for one in stats.worker_stats)
        facts.append(Fact("Event loop late by at most", wording.duration(delay_ms)))
    return facts + _overhead_facts(state)


def upstream_facts(state: LiveState, stats: TapStats) -> list[Fact]:
    against = state.reasons_against_upstreams()
    facts = []
    for origin, reached in sorted(state.reachable.items()):
        rows = [one for worker in stats.worker_stats for one in worker.upstreams if one.upstream == origin]
        words = ["takes connections" if reached else "does not take connections"]
        if rows:
            words.append(f"{wording.count(sum(one.in_flight for one in rows))} in flight")
            words.append(f"{wording.count(sum(one.requests for one in rows))} requests")
        if hashed := sum(one.prompt_bytes for one in rows):
            words.append(f"{wording.share_of(sum(one.known_bytes for one in rows), hashed)} of prompts' starts known")
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


def _restarts_text(restarts: int) -> str:
    return f", restarted {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
