"""Metrics of a run as text: verdict, latency and throughput tables for a terminal (at most 100 columns) and a page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, cohort_title
from measure.metrics.results import (
    STATISTICS,
    CacheSize,
    HealthCheck,
    HitCount,
    Hits,
    Prefill,
    SessionUse,
    SloResult,
    Statistics,
    TraceMetrics,
    UpstreamMetrics,
    Workload,
)
from measure.number_format import (
    NOTHING,
    cache_size,
    compact,
    count,
    coverage_text,
    duration,
    duration_ms,
    factor,
    rate,
    share,
)
from measure.table import TextTable, table_lines

TITLES: Final = {
    "ttft_ms": "TTFT ms",
    "ttft_from_schedule_ms": "TTFT from schedule ms",
    "itl_ms": "ITL ms",
    "tpot_ms": "TPOT ms",
    "e2e_ms": "E2E ms",
    "e2e_per_token_ms": "E2E / token ms",
    "ttfat_ms": "TTFAT ms",
}
"""Titles of metrics that differ from their names."""
RATE_TITLES: Final = {
    "prompt_tps": "total prompt tok/s",
    "cached_tps": "cached prompt tok/s",
    "uncached_tps": "uncached prompt tok/s",
    "completion_tps": "completion tok/s",
}


def metric_lines(metrics: TraceMetrics) -> list[str]:
    """Return all latency and throughput tables as lines, with blank lines between; missing metrics have no row."""
    further = workload_sentences(metrics.workload, metrics.sessions.per_s) if metrics.workload.wall_s else ()
    blocks = chain(
        [session_table(metrics.by_session).lines],
        [table.lines for table in metric_tables(metrics)],
        [[*further, *difference_lines(metrics.hits), *cache_sentences(metrics.cache)]],
        [health_lines(metrics.health), slo_lines(metrics.slos)],
    )
    return [line for block in blocks if block for line in ("", *block)]


def metric_tables(metrics: TraceMetrics) -> list[TextTable]:
    """Return the non-empty tables: latency, throughput, prefill, prefix hits."""
    tables = [
        _statistics("per request", metrics.per_request),
        _statistics("per session", metrics.per_session),
        throughput_table(metrics.workload),
        prefill_table(metrics.prefill),
        upstream_table(metrics.upstreams),
        hit_table(metrics.hits),
    ]
    return [table for table in tables if table.rows]


def headline(metrics: TraceMetrics) -> str:
    """Return the counts of requests, sessions and prefix hits as a sentence."""
    requests, sessions = metrics.requests, metrics.sessions
    is_partial = coverage_text(requests.hit_reported, requests.n, "")
    of = f"{requests.hit_reported:,} of {requests.n:,} requests" if is_partial else "requests"
    with_hit = "" if requests.with_hit is None else f"; {share(requests.with_hit)} of {of} had a hit"
    return (
        f"{requests.completed:,} of {requests.n:,} requests completed ({share(requests.success)}), "
        f"{sessions.completed:,} of {sessions.n:,} sessions{with_hit}"
    )


def verdict(metrics: TraceMetrics) -> str:
    """Return the verdict on the prefix cache as a sentence: share of cached tokens, TTFT of first and later turns."""
    return "; ".join(filter(None, [_served(metrics.hits, metrics.requests.n), _waited(metrics)])) + "."


def _served(hits: Hits, requests: int) -> str:
    """Return the cached share of prompt tokens as text: reported, else simulated."""
    reported, simulated = hits.reported.get(ALL), hits.simulated.get(ALL)
    if reported is not None and reported.rate is not None:
        sentence = f"The prefix cache served {_of_tokens(reported, requests, 'reported cached tokens')}"
        more = simulated is not None and simulated.rate is not None and simulated.rate > 1.01 * reported.rate
        return f"{sentence} (unlimited cache: {share(simulated.rate)})" if simulated is not None and more else sentence
    if simulated is not None and simulated.rate is not None:
        return (
            f"The engine reports no cached tokens; an unlimited prefix cache would serve "
            f"{_of_tokens(simulated, requests, 'block hashes')}"
        )
    return "The trace has no data on the prefix cache"


def _of_tokens(hits: HitCount, requests: int, needed: str) -> str:
    coverage = coverage_text(hits.requests, requests, needed)
    return f"{share(hits.rate)} of {compact(hits.prompt_tokens)} prompt tokens{f' ({coverage})' if coverage else ''}"


def _waited(metrics: TraceMetrics) -> str:
    """Return median TTFTs as text; empty: not recorded."""
    turns, ttft = metrics.prefill.by_turn, metrics.per_request["ttft_ms"]
    coverage = coverage_text(ttft.n if ttft else 0, metrics.requests.n, "time of a first token")
    coverage = f" ({coverage})" if coverage else ""
    if len(turns) > 1:
        first, later = (duration(turns[name].p50) for name in (FIRST_TURN, LATER_TURNS))
        return f"median TTFT: {later} in turns 2+, {first} in first turns{coverage}"
    return "" if ttft is None else f"median TTFT: {duration(ttft.p50)}{coverage}"


def title_of(name: str) -> str:
    """Return a metric's table title, with its unit."""
    return TITLES.get(name) or name.replace("_tps", "_tok/s").replace("_", " ")


def value_text(name: str, value: float) -> str:
    """Format a metric's value for a table, without its unit: latencies, shares, throughput."""
    if "hit_rate" in name:
        return share(value)
    if name.endswith("_ms"):
        return duration_ms(value)
    return factor(value) if name.endswith("_tps") or not float(value).is_integer() else count(value)


def _statistics(title: str, metrics: Mapping[str, Statistics | None]) -> TextTable:
    rows = [
        [title_of(name), *(value_text(name, getattr(statistics, level)) for level in STATISTICS), f"{statistics.n:,}"]
        for name, statistics in metrics.items()
        if statistics is not None
    ]
    return TextTable([title, *STATISTICS, "n"], rows)


MOST_SESSIONS: Final = 20


def session_table(uses: Sequence[SessionUse]) -> TextTable:
    """Return the sessions with the most cached tokens; no rows: not requested."""
    rows = [
        [
            *(session.session_id, f"{session.requests:,}", count(session.prompt_tokens), count(session.cached_tokens)),
            *(share(session.hit_rate), NOTHING if session.ttft_p50_ms is None else duration_ms(session.ttft_p50_ms)),
        ]
        for session in uses[:MOST_SESSIONS]
    ]
    remaining = uses[MOST_SESSIONS:]
    if remaining:
        sums = [sum(getattr(use, name) for use in remaining) for name in ("requests", "prompt_tokens", "cached_tokens")]
        rows.append([f"{len(remaining):,} more", *map(count, sums), NOTHING, NOTHING])
    return TextTable(["session", "requests", "prompt tokens", "cached", "hit rate", "TTFT p50 ms"], rows)


def throughput_table(workload: Workload) -> TextTable:
    """Return token throughput by window; no rows: token counts not recorded."""
    windows = ["overall", "last_30s", "steady"] + (["steady_per_gpu"] if workload.gpus else [])
    titles = {"last_30s": "last 30 s", "steady_per_gpu": "steady/GPU"}
    rows = [
        [title, *(_rate_text(getattr(getattr(workload, name), window)) for window in windows)]
        for name, title in RATE_TITLES.items()
        if getattr(workload, name).overall is not None
    ]
    return TextTable(["workload", *(titles.get(window, window) for window in windows)], rows)


def workload_sentences(workload: Workload, sessions_per_s: float | None) -> Iterator[str]:
    """Yield lines with wall time, requests in flight and goodput."""
    yield f"wall time {workload.wall_s:,.1f} s, {_rate_text(sessions_per_s)} sessions/s"
    flight = workload.concurrency
    if flight is not None:
        yield f"concurrency: mean {rate(flight.mean)}, p50 {flight.p50:,}, p90 {flight.p90:,}, max {flight.max:,}"
    good = workload.goodput
    if good is not None:
        met = f"{good.requests:,} requests ({share(good.share)})"
        yield f"goodput: {met}, {_rate_text(good.requests_per_s)} a second, {_rate_text(good.completion_tps)} tok/s"


def _rate_text(value: float | None) -> str:
    return NOTHING if value is None else factor(value)


def prefill_table(prefill: Prefill) -> TextTable:
    """Return TTFT by turn, in ms; no rows: not recorded."""
    levels = ("mean", "p50", "p90", "p99")
    rows = [
        [cohort_title(name), f"{statistics.n:,}", *(duration_ms(getattr(statistics, level)) for level in levels)]
        for name, statistics in prefill.by_turn.items()
    ]
    return TextTable(["TTFT ms by turn", "n", *levels], rows)


def upstream_table(upstreams: Mapping[str, UpstreamMetrics]) -> TextTable:
    """Return requests, prefix hits and TTFT by upstream; no rows: a single upstream."""
    levels = ("p50", "p90", "p99")
    rows = [
        [
            *(name, f"{upstream.requests:,}", f"{upstream.completed:,}"),
            NOTHING if upstream.hits.rate is None else share(upstream.hits.rate),
            *(
                NOTHING if upstream.ttft_ms is None else duration_ms(getattr(upstream.ttft_ms, level))
                for level in levels
            ),
        ]
        for name, upstream in upstreams.items()
    ]
    return TextTable(["upstream", "requests", "completed", "hit rate", *(f"TTFT {level} ms" for level in levels)], rows)


def hit_table(hits: Hits) -> TextTable:
    """Return cached shares of prompt tokens, reported and simulated, by cohort; no rows: neither is known."""
    accounts = {"reported by the engine": hits.reported, "simulated, unlimited": hits.simulated}
    cohorts = list(hits.reported)
    reported = any(counts[cohort].requests for counts in accounts.values() for cohort in cohorts)
    rows = [
        [title, *(share(counts[cohort].rate) if counts[cohort].requests else NOTHING for cohort in cohorts)]
        for title, counts in accounts.items()
    ]
    return TextTable(["cached of prompt tokens", *map(cohort_title, cohorts)], rows if reported else [])


def difference_lines(hits: Hits) -> list[str]:
    """Return the requests whose reported and simulated prefix hits differ, a line per direction."""
    return [
        f"{diff.accounts}: {diff.requests:,} requests, {count(diff.tokens)} tokens; most in {diff.example}"
        for diff in hits.differences
    ]


def cache_sentences(size: CacheSize | None) -> Iterator[str]:
    """Yield a line with the sufficient KV cache size and the engine's size."""
    if size is None or size.knee_blocks is None:
        return
    of_engine = ""
    if size.engine_blocks is not None and size.engine_tokens is not None:
        engine = _blocks_text(size, size.engine_blocks, size.engine_tokens)
        of_engine = f"; the engine has {engine}: {share(size.engine_share)}"
    enough = _blocks_text(size, size.knee_blocks, size.knee_tokens or 0)
    yield f"cache size: {size.knee_share * 100:g} % of max hits at {enough}{of_engine}"


def _blocks_text(size: CacheSize, blocks: int, tokens: int) -> str:
    return f"{blocks:,} blocks ({cache_size(tokens, size.kv_bytes_per_token)})"


def health_lines(checks: Sequence[HealthCheck]) -> list[str]:
    """Return the failed health checks as lines, and the number of passed checks."""
    marked = [check for check in checks if check.verdict in ("bad", "warning")]
    passed, unknown = (sum(check.verdict == verdict for check in checks) for verdict in ("ok", "unknown"))
    rows = [
        [check.verdict, check.name, f"{check.figure}; see {check.where}" if check.where else check.figure]
        for check in sorted(marked, key=lambda check: check.verdict)
    ]
    lines = [f"health: {passed} checks ok, {len(marked)} warnings, {unknown} without data in the trace"]
    return lines + [f"  {row}" for row in table_lines((), rows, "<<<")] if rows else lines


def slo_lines(results: Sequence[SloResult]) -> list[str]:
    """Return a line per SLO: verdict, limit, value."""
    return [f"SLO {'met' if slo.met else 'MISSED'}: {slo.slo} ({_slo_value(slo)} of {slo.n:,})" for slo in results]


def _slo_value(result: SloResult) -> str:
    if result.unit == "ms":
        return f"{duration_ms(result.value)} ms"
    return share(result.value) if result.unit == "share" else factor(result.value)
