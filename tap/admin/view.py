"""The live page: tables of the tap's state, which the browser asks for again every two seconds."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import NamedTuple

from measure import wording
from measure.histogram import GAP_S, WAIT_S, HistogramCounts, quantile_bound
from tap.admin.state import LiveState
from tap.ipc.messages import Progress, TapStats

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="2">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{trace} · kvtape tap</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
<h1>tap {trace} <span class="{kind}">{status}</span></h1>
<p>{engine} · {at}</p>
{reasons}
<main>
{tables}
</main>
<p>This page shows times, counts and hashes under a secret key: no prompt, output, client or session.
<a href="metrics">metrics</a> <a href="readyz">readyz</a> <a href="healthz">healthz</a></p>
</html>
"""


class Fact(NamedTuple):
    """A named number."""

    name: str
    value: str
    alarm: bool = False


def live_page(state: LiveState) -> bytes:
    unready, unrecorded = state.reasons_against(), state.reasons_not_recording()
    stats = state.stats or TapStats(upstreams=[], workers=0)
    drops = [Fact(reason, wording.count(count), True) for reason, count in sorted(stats.dropped.items())]
    tables = {
        "Traffic": traffic_facts(state, stats),
        "Records": recorder_facts(stats.progress),
        "Dropped, by reason": drops or [Fact("none", "0")],
        "Processes": process_facts(state, stats),
    }
    return PAGE.format(
        trace=escape(Path(state.setup.trace).name),
        status="not ready" if unready else "not recording" if unrecorded else "ready",
        kind="bad" if unready or unrecorded else "good",
        engine=escape(engine_text(stats)),
        at=datetime.now(UTC).strftime("%H:%M:%S UTC"),
        reasons="".join(f'<p class="bad">{escape(reason)}</p>' for reason in unready + unrecorded),
        tables="\n".join("".join(_table(title, facts)) for title, facts in tables.items()),
    ).encode()


def _table(title: str, facts: Sequence[Fact]) -> Iterator[str]:
    yield f"<table><caption>{title}</caption>"
    for name, value, alarm in facts:
        yield f"<tr><th>{escape(name)}</th><td{' class=bad' if alarm else ''}>{escape(value)}</td></tr>"
    yield "</table>"


def engine_text(stats: TapStats) -> str:
    engine, upstreams = stats.engine, stats.upstreams
    words = [] if engine is None else [" ".join(filter(None, (engine.name, engine.version)))]
    if engine is not None and engine.num_gpu_blocks and engine.block_size:
        words.append(f"cache of {wording.compact((engine.num_gpu_blocks - 1) * engine.block_size)} tokens")
    words.append(upstreams[0] if len(upstreams) == 1 else f"{len(upstreams)} upstreams" if upstreams else "")
    return " · ".join(filter(None, words))


def traffic_facts(state: LiveState, stats: TapStats) -> list[Fact]:
    workers, numbers = stats.worker_stats, stats.progress.numbers
    queue, limit = sum(one.queue_bytes for one in workers), sum(one.queue_limit_bytes for one in workers)
    cached = wording.share_of(numbers.cached_tokens, numbers.prompt_tokens) if numbers.cached_tokens else "not reported"
    return [
        Fact("Requests a second", wording.rate(state.requests_a_second)),
        Fact("Requests in flight", wording.count(sum(one.in_flight for one in workers))),
        Fact("Client connections", wording.count(sum(one.connections for one in workers))),
        Fact("Prompt tokens", wording.count(numbers.prompt_tokens)),
        Fact("of them cached", cached),
        Fact("Output tokens", wording.count(numbers.output_tokens)),
        Fact("TTFT p50 · p90", _bounds_text(WAIT_S, numbers.ttft)),
        Fact("Gap between reads p50 · p90", _bounds_text(GAP_S, numbers.gaps)),
        Fact("Copies on their way", f"{wording.size(queue)} of {wording.size(limit)}", queue * 2 > limit > 0),
    ]


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
    return facts


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


def _bounds_text(bounds: Sequence[float], counts: HistogramCounts) -> str:
    """Return the buckets of the median and of p90, in words; a dash without values."""
    if not counts.count:
        return "–"
    found = [quantile_bound(bounds, counts, level) for level in (0.5, 0.9)]
    return " · ".join(
        f"{'≤' if bound_s <= bounds[-1] else '>'} {wording.duration(1e3 * min(bound_s, bounds[-1]))}"
        for bound_s in found
    )


def _restarts_text(restarts: int) -> str:
    return f", restarted {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
