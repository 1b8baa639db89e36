"""Results of forecasts as records, exactly as ``--json`` writes them; docs/metrics.md defines every key."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from report.grid.points import Grid, Point, Span

MEASURED: Final = "measured"
NOT_TRUSTED: Final = " (not to be trusted: the model's error on this capture is larger than the gates' limits)"
Kind = Literal["measured", "capture", "base", "scenario"]
"""The trace's own numbers; their forecast; the forecast that effects are against, if ``--base`` asks for it; others."""


class EffectGate(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on a scenario, judged at the middle member."""

    gate: str
    row: str
    measure: str
    key: str | None
    """``difference`` or ``ratio``; null: the forecast itself."""
    passed: bool
    sure: bool
    """False: a part of the members says otherwise, so that it neither passed nor failed."""
    span: Span | None
    """Null: the forecast has no such number."""


class DemandSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a load asks of the engine, per second of its arrivals; null: fewer than two independent arrivals."""

    utilization: float | None
    """Work asked for over capacity: 1 and more is saturated."""
    prefill: float | None
    """Seconds of step time for uncached prompt tokens."""
    decode: float | None
    """Seconds of step time for generated tokens."""
    frontend: float | None
    """Seconds of the API server on the engine's core."""
    capacity: float | None
    """Seconds of such work in a second of the engine with full batches."""
    in_flight_growth_per_s: float | None
    """Growth of the number of requests in flight, over the arrivals that wait for no other request."""
    in_flight_at_end: int
    """Requests in flight at the last such arrival, itself not included."""
    saturated: bool


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet's routing, of a run without noise."""

    engines: int
    route: str
    most_requests: int
    """On one engine; and the fewest."""
    fewest_requests: int
    work_ratio: float
    """Step time of the busiest engine over the mean."""
    failed: int
    """Requests that failed as an engine died or none was up."""


class TierSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of the memory behind the pool, of a run without noise."""

    loads: int
    loaded_tokens: int
    read_gb: float
    written_gb: float
    kept_blocks: int
    evicted_blocks: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT survival: the share of requests still without a first token after each time."""

    time_ms: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]
    stops: bool
    """The curve ends where the capture would have ended, with requests still waiting: saturated, open loop."""


class Row(Point, frozen=True, kw_only=True):
    """The captured load as measured, or a forecast."""

    kind: Kind
    rate: float
    cold_prompts: bool
    num_gpu_blocks: int
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    """By measure, forecast / measured − 1. Of the row ``capture`` alone."""
    demand: DemandSummary | None = None
    """Null: measured, not forecast."""
    routing: Routing | None = None
    """Null: one engine."""
    tiers: TierSummary | None = None
    """Null: no memory behind the pool."""
    curves: dict[str, Curve]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A whole what-if: the measured row where the trace has times, forecasts after it."""

    schema: str = "kvtape-what-if/2"
    trace: str
    trace_digest: str
    model_digest: str
    members: int
    seed: int
    confidence: float
    paced: bool
    requests: int
    cohorts: dict[str, int]
    engine: dict[str, Any]
    """Settings of the forecast that effects are against."""
    verdicts: list[str]
    """Validation of the model, on this trace or another, and its error on this very capture."""
    unchanged: str | None = None
    """Reason why every scenario equals the base in every member. Null: some differ."""
    notes: list[str]
    rows: list[Row]
    gates: list[EffectGate] = []


class ForecastPoint(Point, frozen=True, kw_only=True):
    """A combination of values, forecast."""

    members: int
    saturated: bool | None = None
    """Null with one member; so the measure ``utilization``."""
    gpus: int = 1
    changes: int = 0
    """Axes on which it differs from today's setting."""
    same_load: bool = True
    """Its traffic is that of today's setting: rate, prompts, events."""


class ForecastGrid(Grid, frozen=True, kw_only=True):
    """Result of ``sim sweep`` and ``sim search``."""

    points: Sequence[ForecastPoint]
    trace_digest: str
    model_digest: str
    trusted: bool = True
    """False: the model's error on this capture is larger than the gates' limits."""
    paced: bool
    requests: int
    seed: int
    members: int
    limits: list[str]
    """Target, or SLOs. Empty: the limit is today's latency."""
    count: int
    """Points forecast."""


Outcome = Literal["found", "all hold", "none holds", "interrupted"]
"""``all hold``: the hardest value in range does; ``none holds``: the easiest value does not."""


class Search(ForecastGrid, frozen=True, kw_only=True):
    """Result of ``sim search``."""

    quantity: str
    low: float
    high: float
    tolerance: float
    scenario: str
    outcome: Outcome
    answer: float | None
    """The smallest or the largest value that holds with every evaluated value on its easy side. Null: none."""


class GridSweep(ForecastGrid, frozen=True, kw_only=True):
    """Result of ``sim sweep``; the Parquet file has every point."""

    gpu_price: float | None
    """Of a GPU and hour. Null: not given, and cost is null."""
    refined: int
    """Points with all members."""
    today: ForecastPoint
    chosen: ForecastPoint | None
    """Cheapest point at today's load that keeps the limits. Null: none does."""
