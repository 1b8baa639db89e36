"""Metrics of a run as lines for a terminal: tables of at most 100 columns."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from measure.cohorts import cohort_title
from measure.metrics.results import (
    STATISTICS,
    HealthCheck,
    Hits,
    PrefillGroup,
    SloResult,
    Statistics,
    TraceMetrics,
    Workload,
)
from measure.table import table_lines
from measure.wording import NOTHING, count, duration_ms, factor, rate, share

TITLES: Final = {
    "ttft_ms": "TTFT ms",
    "ttft_from_schedule_ms": "TTFT from schedule ms",
    "itl_ms": "ITL ms",
    "tpot_ms": "TPOT ms",
    "tpot_veeksha_ms": "TPOT (Veeksha) ms",
    "tbc_ms": "TBC ms",
    "e2e_ms": "E2E ms",
    "e2e_per_token_ms": "E2E / token ms",
    "interactivity_tps": "interactivity tok/s",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "turns": "turns",
    "latency_ms": "latency ms",
    "ttfat_ms": "TTFAT ms",
    "decode_tps": "decode tok/s",
    "hit_rate": "hit rate",
    "eligible_hit_rate": "eligible hit rate",
    "eligible_hit_rate_trie": "eligible (trie)",
    "eligible_hit_rate_evalscope": "eligible (evalscope)",
    "requests": "requests",
    "first_prompt_tokens": "input prompt tokens",
    "turn_output_tokens": "output tokens / turn",
    "appended_tokens": "tool or user tok / turn",
    "pause_ms": "tool or think time ms",
    "final_output_tokens": "final output tokens",
}
RATE_TITLES: Final = {
    "prompt_tps": "total prompt tok/s",
    "cached_tps": "cached prompt tok/s",
    "uncached_tps": "uncached prompt tok/s",
    "completion_tps": "completion tok/s",
}


def metric_lines(metrics: TraceMetrics) -> list[str]:
    """Return every table, a blank line before each; a metric that the trace lacks has no row."""
    blocks = chain(
        [_statistics("per request", metrics.per_request), _statistics("per session", metrics.per_session)],
        [_statistics("shape", metrics.shape), _workload(metrics)],
        [_prefill("prompt tokens", metrics.prefill.by_prompt_tokens)],
        [_prefill("uncached tokens", metrics.prefill.by_uncached_tokens)],
        [_hits(metrics.hits), health_lines(metrics.health), slo_lines(metrics.slos)],
    )
    return [line for block in blocks if block for line in ("", *block)]


def headline(metrics: TraceMetrics) -> str:
    """Return the counts of requests and sessions as a sentence."""
    requests, sessions = metrics.requests, metrics.sessions
    with_hit = "" if requests.with_hit is None else f"; {share(requests.with_hit)} of requests had a hit"
    return (
        f"{requests.completed:,} of {requests.n:,} requests completed ({share(requests.success)}), "
        f"{sessions.completed:,} of {sessions.n:,} sessions{with_hit}"
    )


def value_text(name: str, value: float) -> str:
    """Return a metric's value as tables show it, without its unit."""
    if "hit_rate" in name:
        return share(value)
    if name.endswith("_ms"):
        return duration_ms(value)
    return factor(value) if name.endswith("_tps") or not float(value).is_integer() else count(value)


def _statistics(title: str, found: Mapping[str, Statistics | None]) -> list[str]:
    rows = [
        [TITLES[name], *(value_text(name, getattr(one, each)) for each in STATISTICS), f"{one.n:,}"]
        for name, one in found.items()
        if one is not None
    ]
    return table_lines([title, *STATISTICS, "n"], rows, "<") if rows else []


def _workload(metrics: TraceMetrics) -> list[str]:
    found = metrics.workload
    if not found.wall_s:
        return []
    windows = ["overall", "last_30s", "steady"] + (["steady_per_gpu"] if found.gpus else [])
    titles = {"last_30s": "last 30 s", "steady_per_gpu": "steady/GPU"}
    rows = [
        [title, *(_rate_text(getattr(getattr(found, name), window)) for window in windows)]
        for name, title in RATE_TITLES.items()
        if getattr(found, name).overall is not None
    ]
    lines = table_lines(["workload", *(titles.get(window, window) for window in windows)], rows, "<") if rows else []
    return [*lines, *_overview(metrics), *_further(metrics.workload, metrics.sessions.per_s)]


def _overview(metrics: TraceMetrics) -> list[str]:
    row = metrics.overview
    told = [
        NOTHING if row.concurrency is None else f"{row.concurrency:,}",
        NOTHING if row.rate is None else f"{row.rate:g}",
        f"{row.n:,}",
        *(_rate_text(one) for one in (row.rps, row.gen_tps)),
        share(row.success),
    ]
    return ["", *table_lines(["Conc", "Rate", "Num", "RPS", "Gen/s", "Success"], [told])]


def _further(found: Workload, sessions_per_s: float | None) -> Iterator[str]:
    yield f"wall time {found.wall_s:,.1f} s, {_rate_text(sessions_per_s)} sessions/s"
    flight = found.concurrency
    if flight is not None:
        yield f"concurrency: mean {rate(flight.mean)}, p50 {flight.p50:,}, p90 {flight.p90:,}, max {flight.max:,}"
    if found.tpot_based_tps is not None:
        tbc = _rate_text(found.tbc_based_tps)
        yield f"tok/s of one stream: {rate(found.tpot_based_tps)} by mean TPOT, {tbc} by p99 TBC"
    good = found.goodput
    if good is not None:
        kept = f"{good.requests:,} requests ({share(good.share)})"
        yield f"goodput: {kept}, {_rate_text(good.requests_per_s)} a second, {_rate_text(good.completion_tps)} tok/s"


def _rate_text(value: float | None) -> str:
    return NOTHING if value is None else factor(value)


def _prefill(title: str, groups: Sequence[PrefillGroup]) -> list[str]:
    rows = [
        [
            f"{group.from_tokens:,}–{group.to_tokens:,}"
            if group.to_tokens > group.from_tokens
            else f"{group.to_tokens}",
            f"{group.ttft_ms.n:,}",
            *(duration_ms(getattr(group.ttft_ms, name)) for name in ("mean", "p50", "p90", "p99")),
        ]
        for group in groups
    ]
    return table_lines([f"TTFT ms by {title}", "n", "mean", "p50", "p90", "p99"], rows, "<") if rows else []


def _hits(hits: Hits) -> list[str]:
    accounts = {
        "accounted (turn before)": hits.accounted,
        "reported by the engine": hits.reported,
        "simulated, unlimited": hits.simulated,
    }
    cohorts = list(hits.reported)
    if not any(found[cohort].requests for found in accounts.values() for cohort in cohorts):
        return []
    rows = [
        [title, *(share(found[cohort].rate) if found[cohort].requests else NOTHING for cohort in cohorts)]
        for title, found in accounts.items()
    ]
    lines = table_lines(["cached of prompt tokens", *(cohort_title(cohort) for cohort in cohorts)], rows, "<")
    return lines + [
        f"{one.accounts}: {one.requests:,} requests, {count(one.tokens)} tokens; most in {one.example}"
        for one in hits.partings
    ]


def health_lines(checks: Sequence[HealthCheck]) -> list[str]:
    """Return the checks that are not ok, and how many are."""
    marked = [one for one in checks if one.verdict in ("bad", "look")]
    fine, silent = (sum(one.verdict == verdict for one in checks) for verdict in ("ok", "unknown"))
    rows = [
        [one.verdict, one.name, f"{one.figure}; see {one.where}" if one.where else one.figure]
        for one in sorted(marked, key=lambda one: one.verdict)
    ]
    lines = [f"health: {fine} checks ok, {len(marked)} to look at, {silent} not told by the trace"]
    return lines + [f"  {row}" for row in table_lines((), rows, "<<<")] if rows else lines


def slo_lines(results: Sequence[SloResult]) -> list[str]:
    """Return a line for each SLO."""
    return [
        f"SLO {'met' if one.met else 'MISSED'}: {f'{one.name}: ' if one.name else ''}{one.slo} "
        f"({_slo_value(one)} of {one.n:,})"
        for one in results
    ]


def _slo_value(result: SloResult) -> str:
    if result.unit == "ms":
        return f"{duration_ms(result.value)} ms"
    return share(result.value) if result.unit == "share" else factor(result.value)
