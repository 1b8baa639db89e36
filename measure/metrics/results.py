"""Metrics of a run as ``--json`` writes them; docs/metrics.md defines every key.

Latencies in ms, rates and shares as fractions, throughput per second. Null: not recorded in the trace.
"""

from typing import Literal

import msgspec

SCHEMA = "kvtape-metrics/1"
STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "max")
WINDOWS = ("overall", "last_30s", "steady", "steady_per_gpu")

Verdict = Literal["ok", "warning", "bad", "unknown"]


class Statistics(msgspec.Struct, frozen=True):
    """Statistics of a latency or token sample; quantiles are order statistics ⌈q·n⌉."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by status, prefix hit and missing token counts."""

    n: int
    completed: int
    """Ended with status ok."""
    cancelled: int
    """Aborted at the planned end of the run."""
    success: float
    """Share of completed requests, without cancelled requests."""
    statuses: dict[str, int]
    hit_reported: int
    """Requests with a reported count of cached tokens."""
    with_hit: float | None
    """Share of ``hit_reported`` with a prefix hit."""
    without_hashes: int
    without_usage: int
    """Completed requests without prompt or output token counts."""
    without_cached_tokens: int
    """Completed requests without reported cached tokens."""
    without_token_times: int
    """Completed requests that were not streamed, so that no token has a time."""


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions; a request without a session is a session."""

    n: int
    completed: int
    """Sessions whose requests all ended with status ok."""
    per_s: float | None
    """Completed sessions per second of wall time."""


class SessionUse(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a session, and prompt tokens that the prefix cache served."""

    session_id: str
    """Request id for a request without a session."""
    requests: int
    prompt_tokens: int
    """Over requests with prompt token counts."""
    cached_tokens: int
    """Over requests that report them; ``hit_rate`` is their share of these requests' prompt tokens."""
    hit_rate: float | None
    ttft_p50_ms: float | None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A throughput per second in four windows of the run."""

    overall: float | None = None
    last_30s: float | None = None
    steady: float | None = None
    steady_per_gpu: float | None = None
    """Null: number of GPUs unknown."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight and token throughput in equal intervals of wall time."""

    interval_s: float
    in_flight: list[float]
    """Mean number of requests in flight in each interval."""
    prompt_tps: list[float]
    completion_tps: list[float]
    cached_tps: list[float]
    """Over requests with reported cached tokens, as ``uncached_tps``."""
    uncached_tps: list[float]


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight (decode batch and queue), weighted by time."""

    mean: float
    p50: int
    p90: int
    max: int


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Completed requests that meet all SLOs on metrics per request, and their token throughput."""

    requests: int
    share: float
    """Share of all requests."""
    requests_per_s: float | None
    completion_tps: float | None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput and load of a run; tokens of a completed request count at its end."""

    wall_s: float
    """Seconds from the first arrival to the last end."""
    gpus: int | None
    requests_per_s: float | None
    prompt_tps: Rates
    cached_tps: Rates
    uncached_tps: Rates
    completion_tps: Rates
    concurrency: Concurrency | None
    timeline: Timeline | None
    goodput: Goodput | None = None
    """Null: no SLO on a metric per request."""


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT by turn: prefill of first prompts, and of later prompts with cached prefixes."""

    by_turn: dict[str, Statistics]
    """Statistics of TTFT by cohort: first turns, later turns."""


class HitCount(msgspec.Struct, frozen=True, kw_only=True):
    """Cached prompt tokens, over requests with data."""

    requests: int
    tokens: int
    prompt_tokens: int
    """Prompt tokens of these requests."""
    rate: float | None
    """tokens / prompt_tokens."""


class UpstreamMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and prefix hits of an engine behind a router."""

    requests: int
    completed: int
    hits: HitCount
    """Prefix hits that the engine reported."""
    ttft_ms: Statistics | None


class HitDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose reported and simulated prefix hits differ by a block or more."""

    accounts: str
    """``reported < simulated`` or ``reported > simulated``."""
    requests: int
    tokens: int
    example: str
    """Id of the request with the largest difference."""


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Cached prompt tokens, reported and simulated, by cohort."""

    reported: dict[str, HitCount]
    """Reported by the engine."""
    simulated: dict[str, HitCount]
    """In an unlimited prefix cache over the trace's block hashes."""
    differences: list[HitDifference]


class CacheSize(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix hits by size of an LRU cache of the trace's blocks (``sim curve``)."""

    block_size: int
    """The engine's, else the trace's."""
    unlimited_rate: float
    """Hit tokens of an unlimited cache, of prompt tokens."""
    knee_share: float
    knee_blocks: int | None
    """Smallest size with ``knee_share`` of these hits. Null: no hits."""
    knee_tokens: int | None
    engine_blocks: int | None
    """Usable KV cache blocks of the engine. Null: unknown."""
    engine_tokens: int | None
    engine_rate: float | None
    """Hit tokens at the engine's size, of prompt tokens."""
    engine_share: float | None
    """Share of the hits of an unlimited cache."""
    kv_bytes_per_token: int | None
    """Set by the user. Null: sizes are not shown in memory."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Client overhead in the latencies."""

    lag_ms: Statistics | None
    """|arrival − schedule|, without requests queued by a concurrency limit. Null: no schedule."""
    limit_ms: float
    """Lag above which a request is late."""
    late: int
    held: int
    """Requests queued by the concurrency limit."""
    loop_delay_ms: Statistics | None = None
    """Lateness of timers in the sending processes. Null: not recorded."""
    crossing_delay_ms: Statistics | None = None
    """From the end of a response to its delivery to the sending process. Null: not recorded."""


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Health check: verdict, figure, and where to look."""

    name: str
    verdict: Verdict
    """warning: some requests, or a doubt; bad: the numbers of the run are unreliable; unknown: no data."""
    figure: str
    where: str
    """Empty: ok."""


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an SLO on a latency, throughput or share."""

    slo: str
    value: float
    unit: str
    met: bool
    n: int
    """Sample size of the value."""


class TraceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics of a trace: latency, throughput, prefix hits."""

    schema: str = SCHEMA
    source: str | None
    engine: str | None
    model: str | None
    requests: RequestCounts
    per_request: dict[str, Statistics | None]
    sessions: SessionCounts
    per_session: dict[str, Statistics | None]
    """Over completed sessions."""
    by_session: list[SessionUse] = []
    """With ``--by session``: sessions with the most cached tokens first."""
    workload: Workload
    prefill: Prefill
    hits: Hits
    cache: CacheSize | None
    """Null: no block hashes, or the end of a run, which does not store them."""
    upstreams: dict[str, UpstreamMetrics]
    """Metrics by upstream, for several upstreams."""
    client: Client
    health: list[HealthCheck]
    slos: list[SloResult] = []
