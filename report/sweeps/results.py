"""A sweep's results as records, exactly as ``report sweep --json`` writes them; docs/metrics.md defines every key."""

from typing import Final, Literal

import msgspec

from measure.metrics.results import SloResult
from measure.wording import factor, rate

SCHEMA: Final = "kvtape-sweep/1"
LoadKind = Literal["parallel", "rate", "in_flight"]
"""Quantity that the points of a line differ by: the concurrency limit, arrivals a second, mean requests in flight."""
LOAD_TITLES: Final[dict[LoadKind, str]] = {"parallel": "Conc", "rate": "Rate", "in_flight": "in flight"}


class Value(msgspec.Struct, frozen=True):
    """A metric of a point over its repeats."""

    median: float
    low: float
    """Smallest of the repeats."""
    high: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A label at one load."""

    load: float
    runs: list[str]
    """Its repeats."""
    values: dict[str, Value | None]
    """Null: a repeat does not tell it."""
    slos: list[SloResult]
    """Of the median value."""
    pareto: list[str]
    """Axes beside throughput, ``interactivity`` and ``latency``, on which no load of this label dominates it."""

    @property
    def meets(self) -> bool:
        return all(slo.met for slo in self.slos)

    def median(self, name: str) -> float | None:
        value = self.values[name]
        return None if value is None else value.median


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A label of a workload, its points by load."""

    label: str
    points: list[Point]
    largest_load: float | None
    """Largest load that meets every SLO, as all smaller loads do. Null: none does, or no SLO was asked."""

    @property
    def judged(self) -> bool:
        return any(point.slos for point in self.points)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A label's value over another's, with its interval."""

    value: float
    low: float | None = None
    """Null: no interval, see ``by``."""
    high: float | None = None
    by: Literal["repeats", "runs", "sessions"] | None
    """Source of the interval: differences between repeats of both, the spread of the repeated side alone, or resampled
    sessions within single runs. Null: none, as of few sessions, of sessions in one queue of an open loop, or of the
    throughput that one run's rate has set."""
    units: int
    """Repeats, runs of both sides, or sessions of the smallest run."""

    @property
    def text(self) -> str:
        return factor(self.value) + (f" ({self.span})" if self.span else "")

    @property
    def span(self) -> str:
        """The interval; empty if there is none."""
        return "" if self.low is None or self.high is None else f"{factor(self.low)} to {factor(self.high)}"


class PointContrast(msgspec.Struct, frozen=True, kw_only=True):
    """Two labels at one load."""

    load: float
    """The base's; ``own_load`` differs where loads are measured."""
    own_load: float
    ratios: dict[str, Ratio | None]
    """By metric. Null: a side does not tell it, or it is 0."""


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """A label against the first one of its workload."""

    label: str
    against: str
    points: list[PointContrast]
    """Loads that both have."""
    interactivity_tps: float | None
    """Streamed tokens a second per user at which both labels have a throughput. Null: their ranges do not meet."""
    throughput: Ratio | None
    """Throughput there."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Labels that ran one workload."""

    name: str
    """Part of the labels before ``/``; empty: they have none."""
    load: LoadKind
    lines: list[Line]
    contrasts: list[Contrast]
    verdict: list[str]

    def number(self, load: float) -> str:
        return rate(load) if self.load == "in_flight" else f"{load:g}"

    def load_text(self, load: float) -> str:
        """Return a load in words."""
        words = {"parallel": "concurrency {}", "rate": "{} arrivals/s", "in_flight": "{} requests in flight"}
        return words[self.load].format(self.number(load))


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``report sweep``."""

    schema: str = SCHEMA
    confidence: float
    seed: int
    draws: int
    workloads: list[Workload]
    left_out: list[str]
    """Runs without a place in the tables, each with its reason."""
    notes: list[str]
