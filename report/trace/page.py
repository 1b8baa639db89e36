"""The page of one trace: a verdict, cards, health, figures in chapters, every table, provenance."""

from collections.abc import Sequence
from typing import Final

from measure import wording
from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS
from measure.metrics.prefillfit import saved_prefill_ms
from measure.metrics.results import Statistics, TraceMetrics
from measure.metrics.tables import headline, health_lines, metric_tables, slo_lines, verdict, workload_sentences
from report.files.measured import Measured
from report.pages.figures import Figure
from report.pages.page import Card, render
from report.trace.cachesize import size_panels
from report.trace.overtime import load_panels, session_panels
from report.trace.panels import Chapter, Panel
from report.trace.prefillcost import prefill_panels
from report.trace.prefixes import prefix_panels
from report.trace.shapes import shape_panels
from report.trace.waits import wait_panels

CHAPTERS: Final = (
    Chapter(
        "What the prefix cache does",
        "It keeps the KV of prompt blocks. A prompt that begins as an earlier one did skips their prefill.",
        (prefix_panels, size_panels, prefill_panels),
    ),
    Chapter(
        "Waiting for the first token",
        "A request waits in the queue and for the prefill of the tokens that the cache did not serve.",
        (wait_panels,),
    ),
    Chapter("The run over time", "", (load_panels, session_panels)),
    Chapter(
        "Shape of the workload",
        "The axes of an agentic workload. Means hide tails: look at the median beside the mean, and at p99.",
        (shape_panels,),
    ),
)


MOST_CARDS: Final = 8
"""Two lines of a screen."""
Drawn = Sequence[tuple[Chapter, Sequence[Panel]]]


def draw_chapters(measured: Measured) -> Drawn:
    return [(chapter, [panel for draw in chapter.draws for panel in draw(measured)]) for chapter in CHAPTERS]


def trace_figures(drawn: Drawn) -> dict[str, Figure]:
    return {panel.id: panel.figure for _, panels in drawn for panel in panels if panel.figure is not None}


def render_trace(measured: Measured, drawn: Drawn) -> str:
    metrics, run = measured.metrics, measured.run
    return render(
        "trace.html.jinja",
        trace_figures(drawn),
        tool="report show",
        title=run.file,
        headlines=[verdict(metrics), f"{run.file}: {headline(metrics)}"],
        defined="docs/metrics.md",
        cards=cards(metrics),
        chapters=drawn,
        metrics=metrics,
        health=health_lines(metrics.health)[0],
        slos=list(zip(metrics.slos, slo_lines(metrics.slos), strict=True)),
        tables=metric_tables(metrics),
        sentences=list(workload_sentences(metrics.workload, metrics.sessions.per_s)),
        run=run,
    )


def cards(metrics: TraceMetrics) -> list[Card]:
    """Return the numbers of the first screen that the trace has."""
    found = [
        _cached(metrics),
        _saved(metrics),
        *_first_tokens(metrics),
        _pace(metrics),
        _output(metrics),
        _session(metrics),
        Card(
            "Requests completed",
            wording.share(metrics.requests.success),
            f"{metrics.requests.completed:,} of {metrics.requests.n:,}; "
            f"{metrics.sessions.completed:,} of {metrics.sessions.n:,} sessions",
        ),
        _flight(metrics),
    ]
    return [card for card in found if card is not None][:MOST_CARDS]


def _cached(metrics: TraceMetrics) -> Card | None:
    hits = metrics.hits
    reported, simulated = hits.reported.get(ALL), hits.simulated.get(ALL)
    n = metrics.requests.n
    if reported is not None and reported.rate is not None:
        more = simulated is not None and (simulated.rate or 0.0) >= reported.rate
        most = f"unlimited cache: {wording.share(simulated.rate)}" if simulated is not None and more else ""
        return Card(
            "Prompt tokens served by the cache",
            wording.share(reported.rate),
            wording.rests_on(reported.requests, n, "reported cached tokens") or most or "as the engine reports",
        )
    if simulated is not None and simulated.rate is not None:
        part = wording.rests_on(simulated.requests, n, "block hashes")
        title = "Prompt tokens that a cache could serve"
        return Card(title, wording.share(simulated.rate), part or "unlimited, simulated")
    return None


def _saved(metrics: TraceMetrics) -> Card | None:
    """Return the time of the prefill that the engine's cache saved, if this trace tells the price of a token."""
    fit, reported = metrics.prefill.fit, metrics.hits.reported.get(ALL)
    saved_ms = saved_prefill_ms(fit, reported)
    if saved_ms is None or fit is None or reported is None:
        return None
    price = f"{wording.duration_ms(fit.ms_per_1000_tokens)} ms per 1,000"
    return Card(
        "Prefill that the cache saved",
        wording.duration(saved_ms),
        f"{wording.compact(reported.tokens)} tokens, {price}",
    )


def _first_tokens(metrics: TraceMetrics) -> list[Card]:
    turns = metrics.prefill.by_turn
    named = {"turns 2+": turns.get(LATER_TURNS), "first turns": turns.get(FIRST_TURN)}
    if len(turns) < 2:
        named = {"all requests": metrics.per_request["ttft_ms"]}
    return [
        Card(
            f"TTFT p50, {name}",
            wording.duration(one.p50),
            f"p90 {wording.duration(one.p90)}, p99 {wording.duration(one.p99)}",
        )
        for name, one in named.items()
        if one is not None
    ]


def _pace(metrics: TraceMetrics) -> Card | None:
    gaps = metrics.per_request["itl_ms"]
    if gaps is None:
        return None
    return Card("ITL p50", wording.duration(gaps.p50), f"p99 {wording.duration(gaps.p99)}, {gaps.n:,} gaps")


def _output(metrics: TraceMetrics) -> Card | None:
    found = metrics.workload.completion_tps
    if found.steady is None:
        return None
    gpus = f", {wording.factor(found.steady_per_gpu)} a GPU" if found.steady_per_gpu is not None else ""
    return Card("Output tok/s, steady", wording.factor(found.steady), f"over {metrics.workload.wall_s:,.0f} s{gpus}")


def _session(metrics: TraceMetrics) -> Card | None:
    turns, found = metrics.shape["turns"], metrics.per_session["latency_ms"]
    if found is None or turns is None or turns.max == 1:
        return None
    return Card(
        "Session latency p50", wording.duration(found.p50), f"p90 {wording.duration(found.p90)}, turns {_mean(turns)}"
    )


def _mean(found: Statistics) -> str:
    return f"{wording.factor(found.mean)} on average"


def _flight(metrics: TraceMetrics) -> Card | None:
    found = metrics.workload.concurrency
    if found is None:
        return None
    return Card("Requests in flight, mean", wording.rate(found.mean), f"p90 {found.p90:,}, max {found.max:,}")
