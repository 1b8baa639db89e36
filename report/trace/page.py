"""Page of one trace: latency and throughput cards, SLOs, health checks, panels, tables, provenance."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from measure import number_format
from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS
from measure.metrics.results import TraceMetrics
from measure.metrics.tables import headline, health_lines, metric_tables, slo_lines, verdict, workload_sentences
from report.pages.panels import Card, Check, Page, Panel, Table, as_table
from report.trace.cache import size_panel
from report.trace.measured import Measured
from report.trace.over_time import load_panels, session_panel
from report.trace.ttft_survival import wait_panel

CACHE, WAITS, TIME = "Prefix cache", "Time to first token", "Load over time"
MOST_CARDS: Final = 8
"""Two lines of a screen."""


def trace_page(measured: Measured) -> Page:
    metrics, run = measured.metrics, measured.run
    checks = [
        Check("SLO", "met" if slo.met else "MISSED", line.partition(": ")[2])
        for slo, line in zip(metrics.slos, slo_lines(metrics.slos), strict=True)
    ]
    checks += [
        Check("health", row.verdict, f"{row.name}: {row.figure}" + (f"; see {row.where}" if row.where else ""))
        for row in metrics.health
        if row.verdict in ("bad", "warning")
    ]
    return Page(
        tool="report show",
        title=run.file,
        defined="docs/metrics.md",
        headlines=[verdict(metrics), f"{run.file}: {headline(metrics)}"],
        leads=[health_lines(metrics.health)[0]],
        cards=trace_cards(metrics),
        checks=checks,
        panels=[*_figure_panels(measured), *_number_panels(measured)],
    )


def _figure_panels(measured: Measured) -> Iterator[Panel]:
    chapters = {
        CACHE: [size_panel(measured)],
        WAITS: [wait_panel(measured)],
        TIME: [*load_panels(measured), session_panel(measured)],
    }
    for title, (first, *later_panels) in chapters.items():
        yield replace(first, chapter=title)
        yield from later_panels


def _number_panels(measured: Measured) -> Iterator[Panel]:
    metrics, run = measured.metrics, measured.run
    sentences = list(workload_sentences(metrics.workload, metrics.sessions.per_s))
    tables = [as_table(table) for table in metric_tables(metrics)]
    yield Panel(chapter="All metrics", title="All metrics", lines=sentences, tables=tables)
    statuses = ", ".join(f"{count:,} {status}" for status, count in metrics.requests.statuses.items())
    block = number_format.NOTHING if run.meta.block_size is None else f"{run.meta.block_size} tokens"
    facts = [
        *[["trace", run.file], ["written by", metrics.source or "unknown"], ["engine", metrics.engine or "unknown"]],
        *[["model", metrics.model or "unknown"], ["block", block], ["records", f"{metrics.requests.n:,}: {statuses}"]],
        *(["warning", warning] for warning in run.warnings),
    ]
    health = [[check.name, check.verdict, check.figure] for check in metrics.health]
    tables = [Table(["", ""], facts, words=True)]
    tables.append(Table(["check", "verdict", "figure"], health, "All health checks", folded=True, words=True))
    yield Panel(chapter="Provenance", title="Provenance", tables=tables)


def trace_cards(metrics: TraceMetrics) -> list[Card]:
    requests, sessions = metrics.requests, metrics.sessions
    counts = f"{requests.completed:,} of {requests.n:,}; {sessions.completed:,} of {sessions.n:,} sessions"
    cards = [*_cached_cards(metrics), *_latency_cards(metrics), *_load_cards(metrics)]
    return [*cards[: MOST_CARDS - 1], Card("Requests completed", number_format.share(requests.success), counts)]


def _cached_cards(metrics: TraceMetrics) -> Iterator[Card]:
    n, reported, simulated = metrics.requests.n, metrics.hits.reported.get(ALL), metrics.hits.simulated.get(ALL)
    if reported is not None and reported.rate is not None:
        more = simulated is not None and (simulated.rate or 0.0) >= reported.rate
        most = f"unlimited cache: {number_format.share(simulated.rate)}" if simulated is not None and more else ""
        coverage = number_format.coverage_text(reported.requests, n, "reported cached tokens")
        detail = coverage or most or "as the engine reports"
        yield Card("Prompt tokens served by the cache", number_format.share(reported.rate), detail)
    elif simulated is not None and simulated.rate is not None:
        coverage = number_format.coverage_text(simulated.requests, n, "block hashes") or "unlimited, simulated"
        yield Card("Prompt tokens that a cache could serve", number_format.share(simulated.rate), coverage)


def _latency_cards(metrics: TraceMetrics) -> Iterator[Card]:
    turns, gaps, latency = (
        metrics.prefill.by_turn,
        metrics.per_request["itl_ms"],
        metrics.per_session["latency_ms"],
    )
    named = {"turns 2+": turns.get(LATER_TURNS), "first turns": turns.get(FIRST_TURN)}
    for name, ttft in (named if len(turns) > 1 else {"all requests": metrics.per_request["ttft_ms"]}).items():
        if ttft is not None:
            detail = f"p90 {number_format.duration(ttft.p90)}, p99 {number_format.duration(ttft.p99)}"
            yield Card(f"TTFT p50, {name}", number_format.duration(ttft.p50), detail)
    if gaps is not None:
        yield Card(
            "ITL p50", number_format.duration(gaps.p50), f"p99 {number_format.duration(gaps.p99)}, {gaps.n:,} gaps"
        )
    count = metrics.per_session["requests"]
    if latency is not None and count is not None and count.max > 1:
        detail = f"p90 {number_format.duration(latency.p90)}, turns {number_format.factor(count.mean)} on average"
        yield Card("Session latency p50", number_format.duration(latency.p50), detail)


def _load_cards(metrics: TraceMetrics) -> Iterator[Card]:
    output, flight = metrics.workload.completion_tps, metrics.workload.concurrency
    if output.steady is not None:
        gpus = "" if output.steady_per_gpu is None else f", {number_format.factor(output.steady_per_gpu)} a GPU"
        over = f"over {metrics.workload.wall_s:,.0f} s{gpus}"
        yield Card("Output tok/s, steady", number_format.factor(output.steady), over)
    if flight is not None:
        detail = f"p90 {flight.p90:,}, max {flight.max:,}"
        yield Card("Requests in flight, mean", number_format.rate(flight.mean), detail)
