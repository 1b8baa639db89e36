"""Points of a sweep, measured or forecast: latency and throughput with intervals, effects, Pareto set."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from measure import number_format
from measure.cohorts import cohort_title

LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
TTFT: Final = "ttft"
THROUGHPUT: Final = "output_tokens_per_s"
PER_GPU: Final = "output_tokens_per_s_per_gpu"
COST: Final = "cost_per_million_output_tokens"
LATENCY: Final = f"{TTFT}.all.p90"
Setting = int | float | str | bool | None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Value and its interval over members or repeats. Null: unknown, or unbounded."""

    middle: float | None
    low: float | None = None
    high: float | None = None


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Latency, throughput or rate of a point, and its effect on the base, member by member."""

    value: Span
    difference: Span | None = None
    """Point − base, and the ratio of the two. Null: there is no base to this point."""
    ratio: Span | None = None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and throughput of a combination of settings, measured or forecast."""

    name: str
    settings: dict[str, Setting]
    """Settings by axis."""
    measures: dict[str, Measure]
    meets: bool | None = None
    """All SLOs are met. Null: no SLO was given."""
    marks: list[str] = []
    """``pareto``: no point has more throughput and less latency; others as the sweep names them."""
    warnings: list[str] = []
    """Conditions beyond those that were measured."""
    assumptions: list[str] = []
    """Assumptions about KV cache tiers, workers and GPUs that no capture confirms."""

    def middle(self, measure: str) -> float | None:
        value = self.measures.get(measure)
        return None if value is None else value.value.middle


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a sweep: latency and throughput by point."""

    schema: str = "kvtape-grid/2"
    source: str
    """Trace or folder."""
    headlines: list[str]
    verdicts: list[str] = []
    """Validation of the model, on this trace or another, and its error on this very capture."""
    notes: list[str] = []
    axes: list[str]
    latency: str = LATENCY
    """Measure beside throughput in the Pareto set."""
    throughput: str
    columns: list[str]
    """Measures of the table."""
    limit: float | None = None
    """Limit of the latency."""
    points: Sequence[Point]


_TITLES: Final = {
    "hit_rate": "hit rate",
    "requests_per_s": "requests/s",
    THROUGHPUT: "tok/s",
    PER_GPU: "tok/s/GPU",
    COST: "cost/Mtok",
    "interactivity": "tok/s/user",
    "session_latency.p90": "session p90 ms",
    "completed": "completed",
    "in_flight": "in flight",
    "goodput": "good requests/s",
    "within": "members within",
}
_SHARES: Final = ("hit_rate", "completed", "within", "utilization")
_TIMES: Final = (TTFT, "tpot", "queue", "itl", "e2e", "session_latency")


def title_of(measure: str) -> str:
    """Return the column title of a measure, such as latency ``TTFT p90 ms, turns 2+``."""
    if measure in _TITLES or "." not in measure:
        return _TITLES.get(measure, measure)
    metric, *cohort, level = measure.split(".")
    of = f", {cohort_title(cohort[0]).lower()}" if cohort and cohort[0] != "all" else ""
    return f"{metric if metric == 'queue' else metric.upper()} {level} ms{of}"


def reading_of(measure: str) -> Callable[[float], str]:
    if measure in _SHARES:
        return lambda value: f"{value:.1%}"
    if measure.split(".", maxsplit=1)[0] in _TIMES:
        return number_format.duration_ms
    if measure == COST:
        return lambda value: f"{value:.3g}"
    if measure in ("preemptions", "unserved"):
        return lambda value: f"{value:,.0f}"
    return lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def span_text(span: Span, reading: Callable[[float], str]) -> str:
    """``94 [90–99]``; a dash where nothing is known."""
    if span.middle is None:
        return number_format.NOTHING
    if span.low is None or (span.high is not None and reading(span.low) == reading(span.high)):
        return reading(span.middle)
    high = "∞" if span.high is None else reading(span.high)
    return f"{reading(span.middle)} [{reading(span.low)}–{high}]"


def value_text(point: Point, measure: str) -> str:
    value = point.measures.get(measure)
    return number_format.NOTHING if value is None else span_text(value.value, reading_of(measure))


TELLING_FACTOR: Final = 2.0
"""Ratio from which an effect is shown as a factor."""


def effect_text(point: Point, measure: str) -> str:
    """Return the signed difference; from 2 times on the factor; a ratio alone in percent."""
    result = point.measures.get(measure)
    if result is None or result.ratio is None:
        return ""
    ratio, difference, reading = result.ratio, result.difference, reading_of(measure)
    if difference is None or (ratio.middle or 0.0) >= TELLING_FACTOR:
        signed = difference is None and (ratio.middle or 0.0) < TELLING_FACTOR
        return span_text(
            ratio,
            lambda value: number_format.signed_percent(value - 1.0) if signed else f"×{number_format.factor(value)}",
        )
    return span_text(difference, lambda value: f"{'−' if value < 0 else '+'}{reading(abs(value))}")


def setting_text(value: Setting) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_format.NOTHING if value in (None, "") else value if isinstance(value, str) else f"{value:,g}"


def workload_of(point: Point) -> str:
    """Return the label before ``/``, within which labels are compared; empty: none."""
    return str(point.settings.get("label", "")).rpartition("/")[0]


XY = tuple[float, float]


def pareto_set(points: Sequence[XY]) -> list[bool]:
    """Return for each point if no other is at least as large in both coordinates and larger in one."""
    efficient = [False] * len(points)
    highest = float("-inf")
    last: XY | None = None
    for index in sorted(range(len(points)), key=lambda index: points[index], reverse=True):
        if points[index][1] > highest or points[index] == last:
            efficient[index] = True
            highest, last = points[index][1], points[index]
    return efficient
