"""Forecast results (latency, throughput, hit rate) as ``--json`` writes them; docs/metrics.md defines the keys."""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from report.grid.points import Grid, Point, Span

NOT_TRUSTED: Final = " (not to be trusted: the model's error on this capture is larger than the gates' limits)"
Kind = Literal["measured", "capture", "base", "scenario"]
"""Measured load; its forecast (the default base); another base of the effects; scenarios."""
Outcome = Literal["found", "all hold", "none holds"]
"""``all hold``: the hardest value in range holds; ``none holds``: the easiest value does not."""


class EffectGate(msgspec.Struct, frozen=True, kw_only=True):
    """Limit on a scenario, evaluated at the median member."""

    gate: str
    point: str
    measure: str
    key: str | None
    """``difference`` or ``ratio``; null: the forecast itself."""
    passed: bool
    sure: bool
    """False: members disagree, so the gate neither passed nor failed."""
    span: Span | None
    """Null: the forecast lacks the measure."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT survival: share of requests without a first token after each time."""

    time_ms: list[float]
    survival: list[float]
    low: list[float]
    high: list[float]


class ForecastPoint(Point, frozen=True, kw_only=True):
    """Forecast latency and throughput of one setting; or the measured load."""

    kind: Kind = "scenario"
    members: int
    """Null with one member: effects, and the measure ``utilization``."""
    gpus: int = 1
    changes: int = 0
    """Axes that differ from today's setting."""
    same_load: bool = True
    """Rate, prompts and events are those of today's setting."""
    curves: dict[str, Curve] = msgspec.field(default_factory=dict)
    """Survival curves by cohort. Empty in a sweep, which has many points."""

    @property
    def saturated(self) -> bool:
        return "saturated" in self.marks


class ForecastGrid(Grid, frozen=True, kw_only=True):
    """Result of ``sim what-if``, ``sim search`` and ``sim sweep``."""

    points: Sequence[ForecastPoint]
    trace_digest: str
    model_digest: str
    trusted: bool
    """False: the model's error on this capture is larger than the gates' limits."""
    paced: bool
    cohorts: dict[str, int]
    """Requests by cohort."""
    seed: int
    members: int
    limits: list[str] = msgspec.field(default_factory=list)
    """Target, or SLOs. Empty: the limit is today's latency."""
    gates: list[EffectGate] = msgspec.field(default_factory=list)
    gpu_price: float | None = None
    """Price of a GPU for an hour. Null: not given, and cost is null."""
    outcome: Outcome | None = None
    """Result of ``sim search``."""

    def marked(self, mark: str) -> ForecastPoint | None:
        return next((point for point in self.points if mark in point.marks), None)
