"""Metrics of a run as records, exactly as ``--json`` writes them; docs/metrics.md defines every key.

Times in ms, rates and shares as fractions, throughput per second. Null: the trace does not say.
"""

from typing import Literal

import msgspec

SCHEMA = "kvtape-metrics/1"
STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "max")
WINDOWS = ("overall", "last_30s", "steady", "steady_per_gpu")

Verdict = Literal["ok", "look", "bad", "unknown"]


class Statistics(msgspec.Struct, frozen=True):
    """A sample in eight numbers; quantiles are order statistics ⌈q·n⌉."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of the trace by their end."""

    n: int
    completed: int
    """Ended with status ok."""
    cancelled: int
    """Aborted at the end of the run's own time, as planned."""
    success: float
    """Completed, of those that were not cancelled."""
    statuses: dict[str, int]
    hit_reported: int
    """Requests with a reported count of cached tokens."""
    with_hit: float | None
    """Share of these with any."""
    without_hashes: int
    without_usage: int
    """Of the completed: those that lack the tokens of prompt or output."""
    without_cached_tokens: int
    """Of the completed."""
    without_token_times: int
    """Of the completed: responses that were not streamed, so that no token has a time."""


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions; a request without one is a session of its own."""

    n: int
    completed: int
    """All requests of the trace ended with status ok."""
    per_s: float | None
    """Completed sessions over wall time."""


class SessionUse(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one session and what the prefix cache served of their prompts."""

    session_id: str
    """Of a request without a session: its own id."""
    requests: int
    prompt_tokens: int
    """Of requests with known ones."""
    cached_tokens: int
    """Of requests that report them; their share of these requests' prompt tokens is ``hit_rate``."""
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
    """The run in even intervals of its wall time."""

    interval_s: float
    in_flight: list[float]
    """Mean number of requests in flight in each interval."""
    prompt_tps: list[float]
    completion_tps: list[float]
    cached_tps: list[float]
    """Of requests with reported cached tokens, as ``uncached_tps``."""
    uncached_tps: list[float]


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight over wall time, each moment with equal weight."""

    mean: float
    p50: int
    p90: int
    max: int


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Completed requests that keep every limit of the SLOs on metrics of a request."""

    requests: int
    share: float
    """Of all requests."""
    requests_per_s: float | None
    completion_tps: float | None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The run as a whole; tokens of a completed request count at its end."""

    wall_s: float
    """From the first arrival to the last end."""
    gpus: int | None
    requests_per_s: float | None
    prompt_tps: Rates
    cached_tps: Rates
    uncached_tps: Rates
    completion_tps: Rates
    concurrency: Concurrency | None
    timeline: Timeline | None
    goodput: Goodput | None = None
    """Null: no SLO on a metric of a request."""


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT by turn."""

    by_turn: dict[str, Statistics]
    """First turns and later ones, by cohort."""


class HitCount(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens by one account, over the requests that it knows."""

    requests: int
    tokens: int
    prompt_tokens: int
    """Of these requests."""
    rate: float | None
    """tokens / prompt_tokens."""


class UpstreamMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Engine of several behind a router."""

    requests: int
    completed: int
    hits: HitCount
    """Reported by the engine."""
    ttft_ms: Statistics | None


class HitParting(msgspec.Struct, frozen=True, kw_only=True):
    """Requests on which the accounts differ by a block or more."""

    accounts: str
    """``reported < simulated``: the first has fewer."""
    requests: int
    tokens: int
    example: str
    """Id of the request with the largest difference."""


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens by two accounts, by cohort."""

    reported: dict[str, HitCount]
    """By the engine."""
    simulated: dict[str, HitCount]
    """By an unlimited cache over the trace's block hashes."""
    partings: list[HitParting]


class CacheSize(msgspec.Struct, frozen=True, kw_only=True):
    """Hits by size of an LRU of the trace's blocks (``sim curve``)."""

    block_size: int
    """The engine's, else the trace's."""
    unlimited_rate: float
    """Hit tokens of an unlimited cache, of prompt tokens."""
    knee_share: float
    knee_blocks: int | None
    """Smallest size with ``knee_share`` of these hits. Null: there are none."""
    knee_tokens: int | None
    engine_blocks: int | None
    """Usable blocks of the engine. Null: unknown."""
    engine_tokens: int | None
    engine_rate: float | None
    """Hit tokens at the engine's size, of prompt tokens."""
    engine_share: float | None
    """Of the hits of an unlimited cache."""
    kv_bytes_per_token: int | None
    """As the user said. Null: no size is shown in memory."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own part in the times."""

    lag_ms: Statistics | None
    """|arrival − schedule| of the requests that no concurrency limit queued. Null: no plan."""
    limit_ms: float
    """Lag above this is late."""
    late: int
    held: int
    """Requests queued by the concurrency limit."""
    loop_delay_ms: Statistics | None = None
    """Lateness of timers in the senders. Null: the trace does not say."""
    crossing_delay_ms: Statistics | None = None
    """From a response's end to its being known to the shard. Null: the trace does not say."""


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check of the run, its figure, and the place to look at."""

    name: str
    verdict: Verdict
    """look: some requests, or a doubt; bad: the run's numbers are not what they seem; unknown: the trace is silent."""
    figure: str
    where: str
    """Empty: nothing to look at."""


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """An SLO and what was found."""

    slo: str
    value: float
    unit: str
    met: bool
    n: int
    """Sample behind the value."""


class TraceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics of a trace."""

    schema: str = SCHEMA
    source: str | None
    engine: str | None
    model: str | None
    requests: RequestCounts
    per_request: dict[str, Statistics | None]
    sessions: SessionCounts
    per_session: dict[str, Statistics | None]
    """Of completed sessions."""
    by_session: list[SessionUse] = []
    """With ``--by session``: those with the most cached tokens first."""
    workload: Workload
    prefill: Prefill
    hits: Hits
    cache: CacheSize | None
    """Null: no block hashes, or a run's own end, where they are not kept."""
    upstreams: dict[str, UpstreamMetrics]
    """By name, where several served."""
    client: Client
    health: list[HealthCheck]
    slos: list[SloResult] = []
