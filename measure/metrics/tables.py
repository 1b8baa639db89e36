"""Metrics of a run in words: the verdict, and tables for a terminal (at most 100 columns) and for a page."""

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
    duration,
    duration_ms,
    factor,
    rate,
    rests_on,
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
"""Titles of metrics that are not the words of their names."""
RATE_TITLES: Final = {
    "prompt_tps": "total prompt tok/s",
    "cached_tps": "cached prompt tok/s",
    "uncached_tps": "uncached prompt tok/s",
    "completion_tps": "completion tok/s",
}


def metric_lines(metrics: TraceMetrics) -> list[str]:
    """Return every table, a blank line before each; a metric that the trace lacks has no row."""
    further = workload_sentences(metrics.workload, metrics.sessions.per_s) if metrics.workload.wall_s else ()
    blocks = chain(
        [session_table(metrics.by_session).lines],
        [table.lines for table in metric_tables(metrics)],
        [[*further, *parting_lines(metrics.hits), *cache_sentences(metrics.cache)]],
        [health_lines(metrics.health), slo_lines(metrics.slos)],
    )
    return [line for block in blocks if block for line in ("", *block)]


def metric_tables(metrics: TraceMetrics) -> list[TextTable]:
    """Return the tables that have rows."""
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
    """Return the counts of requests and sessions as a sentence."""
    requests, sessions = metrics.requests, metrics.sessions
    part = rests_on(requests.hit_reported, requests.n, "")
    of = f"{requests.hit_reported:,} of {requests.n:,} requests" if part else "requests"
    with_hit = "" if requests.with_hit is None else f"; {share(requests.with_hit)} of {of} had a hit"
    return (
        f"{requests.completed:,} of {requests.n:,} requests completed ({share(requests.success)}), "
        f"{sessions.completed:,} of {sessions.n:,} sessions{with_hit}"
    )


def verdict(metrics: TraceMetrics) -> str:
    """Return the worth of the prefix cache as a sentence: tokens that it served, and waits of first and later turns."""
    return "; ".join(filter(None, [_served(metrics.hits, metrics.requests.n), _waited(metrics)])) + "."


def _served(hits: Hits, requests: int) -> str:
    """Return the share of prompt tokens by the best account there is."""
    reported, simulated = hits.reported.get(ALL), hits.simulated.get(ALL)
    if reported is not None and reported.rate is not None:
        sentence = f"The prefix cache served {_of_tokens(reported, requests, 'reported cached tokens')}"
        more = simulated is not None and simulated.rate is not None and simulated.rate > 1.01 * reported.rate
        return f"{sentence} (an unlimited one: {share(simulated.rate)})" if simulated is not None and more else sentence
    if simulated is not None and simulated.rate is not None:
        return (
            f"The engine reports no cached tokens; an unlimited prefix cache would serve "
            f"{_of_tokens(simulated, requests, 'block hashes')}"
        )
    return "The trace tells nothing about the prefix cache"


def _of_tokens(hits: HitCount, requests: int, needed: str) -> str:
    part = rests_on(hits.requests, requests, needed)
    return f"{share(hits.rate)} of {compact(hits.prompt_tokens)} prompt tokens{f' ({part})' if part else ''}"


def _waited(metrics: TraceMetrics) -> str:
    """Return median TTFTs; empty: the trace has none."""
    turns, every = metrics.prefill.by_turn, metrics.per_request["ttft_ms"]
    part = rests_on(every.n if every else 0, metrics.requests.n, "time of a first token")
    part = f" ({part})" if part else ""
    if len(turns) > 1:
        first, later = (duration(turns[name].p50) for name in (FIRST_TURN, LATER_TURNS))
        return f"turns 2+ waited {later} at the median for their first token, first turns {first}{part}"
    return "" if every is None else f"requests waited {duration(every.p50)} at the median for their first token{part}"


def title_of(name: str) -> str:
    """Return a metric's title in tables, with its unit."""
    return TITLES.get(name) or name.replace("_tps", "_tok/s").replace("_", " ")


def value_text(name: str, value: float) -> str:
    """Return a metric's value as tables show it, without its unit."""
    if "hit_rate" in name:
        return share(value)
    if name.endswith("_ms"):
        return duration_ms(value)
    return factor(value) if name.endswith("_tps") or not float(value).is_integer() else count(value)


def _statistics(title: str, metrics: Mapping[str, Statistics | None]) -> TextTable:
    rows = [
        [title_of(name), *(value_text(name, getattr(statistics, each)) for each in STATISTICS), f"{statistics.n:,}"]
        for name, statistics in metrics.items()
        if statistics is not None
    ]
    return TextTable([title, *STATISTICS, "n"], rows)


MOST_SESSIONS: Final = 20


def session_table(uses: Sequence[SessionUse]) -> TextTable:
    """Return the sessions that the cache serves the most; no rows: none were asked for."""
    rows = [
        [
            *(session.session_id, f"{session.requests:,}", count(session.prompt_tokens), count(session.cached_tokens)),
            *(share(session.hit_rate), NOTHING if session.ttft_p50_ms is None else duration_ms(session.ttft_p50_ms)),
        ]
        for session in uses[:MOST_SESSIONS]
    ]
    rest = uses[MOST_SESSIONS:]
    if rest:
        sums = [sum(getattr(use, name) for use in rest) for name in ("requests", "prompt_tokens", "cached_tokens")]
        rows.append([f"{len(rest):,} more", *map(count, sums), NOTHING, NOTHING])
    return TextTable(["session", "requests", "prompt tokens", "cached", "hit rate", "TTFT p50 ms"], rows)


def throughput_table(workload: Workload) -> TextTable:
    """Return tokens a second by window; no rows: the trace has no lengths."""
    windows = ["overall", "last_30s", "steady"] + (["steady_per_gpu"] if workload.gpus else [])
    titles = {"last_30s": "last 30 s", "steady_per_gpu": "steady/GPU"}
    rows = [
        [title, *(_rate_text(getattr(getattr(workload, name), window)) for window in windows)]
        for name, title in RATE_TITLES.items()
        if getattr(workload, name).overall is not None
    ]
    return TextTable(["workload", *(titles.get(window, window) for window in windows)], rows)


def workload_sentences(workload: Workload, sessions_per_s: float | None) -> Iterator[str]:
    """Return wall time, requests in flight and goodput, a line each."""
    yield f"wall time {workload.wall_s:,.1f} s, {_rate_text(sessions_per_s)} sessions/s"
    flight = workload.concurrency
    if flight is not None:
        yield f"concurrency: mean {rate(flight.mean)}, p50 {flight.p50:,}, p90 {flight.p90:,}, max {flight.max:,}"
    good = workload.goodput
    if good is not None:
        kept = f"{good.requests:,} requests ({share(good.share)})"
        yield f"goodput: {kept}, {_rate_text(good.requests_per_s)} a second, {_rate_text(good.completion_tps)} tok/s"


def _rate_text(value: float | None) -> str:
    return NOTHING if value is None else factor(value)


def prefill_table(prefill: Prefill) -> TextTable:
    """Return TTFT by turn; no rows: the trace has none."""
    levels = ("mean", "p50", "p90", "p99")
    rows = [
        [cohort_title(name), f"{statistics.n:,}", *(duration_ms(getattr(statistics, level)) for level in levels)]
        for name, statistics in prefill.by_turn.items()
    ]
    return TextTable(["TTFT ms by turn", "n", *levels], rows)


def upstream_table(upstreams: Mapping[str, UpstreamMetrics]) -> TextTable:
    """Return requests, hits and TTFT by upstream; no rows: one served all."""
    levels = ("p50", "p90", "p99")
    rows = [
        [
            *(name, f"{upstream.requests:,}", f"{upstream.completed:,}"),
            NOTHING if upstream.hits.rate is None else share(upstream.hits.rate),
            *(NOTHING if upstream.ttft_ms is None else duration_ms(getattr(upstream.ttft_ms, each)) for each in levels),
        ]
        for name, upstream in upstreams.items()
    ]
    return TextTable(["upstream", "requests", "completed", "hit rate", *(f"TTFT {level} ms" for level in levels)], rows)


def hit_table(hits: Hits) -> TextTable:
    """Return shares of prompt tokens by account and cohort; no rows: no account knows a request."""
    accounts = {"reported by the engine": hits.reported, "simulated, unlimited": hits.simulated}
    cohorts = list(hits.reported)
    reported = any(found[cohort].requests for found in accounts.values() for cohort in cohorts)
    rows = [
        [title, *(share(found[cohort].rate) if found[cohort].requests else NOTHING for cohort in cohorts)]
        for title, found in accounts.items()
    ]
    return TextTable(["cached of prompt tokens", *map(cohort_title, cohorts)], rows if reported else [])


def parting_lines(hits: Hits) -> list[str]:
    """Return the requests on which the accounts of hits part, a line for each way."""
    return [
        f"{parting.accounts}: {parting.requests:,} requests, {count(parting.tokens)} tokens; most in {parting.example}"
        for parting in hits.partings
    ]


def cache_sentences(size: CacheSize | None) -> Iterator[str]:
    """Return the size of cache that is enough and the engine's own, as a line."""
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
    """Return the checks that are not ok, and how many are."""
    marked = [check for check in checks if check.verdict in ("bad", "look")]
    fine, silent = (sum(check.verdict == verdict for check in checks) for verdict in ("ok", "unknown"))
    rows = [
        [check.verdict, check.name, f"{check.figure}; see {check.where}" if check.where else check.figure]
        for check in sorted(marked, key=lambda check: check.verdict)
    ]
    lines = [f"health: {fine} checks ok, {len(marked)} to look at, {silent} not told by the trace"]
    return lines + [f"  {row}" for row in table_lines((), rows, "<<<")] if rows else lines


def slo_lines(results: Sequence[SloResult]) -> list[str]:
    """Return a line for each SLO."""
    return [f"SLO {'met' if slo.met else 'MISSED'}: {slo.slo} ({_slo_value(slo)} of {slo.n:,})" for slo in results]


def _slo_value(result: SloResult) -> str:
    if result.unit == "ms":
        return f"{duration_ms(result.value)} ms"
    return share(result.value) if result.unit == "share" else factor(result.value)
