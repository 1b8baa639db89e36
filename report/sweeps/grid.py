"""A simulated sweep over a grid: its records, exactly as ``sim sweep --json`` writes them, and the same in words."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from measure import wording
from measure.cohorts import cohort_title
from measure.table import TextTable
from report.pages.whatif import NOT_TRUSTED, TTFT, Span, span_text

SCHEMA: Final = "kvtape-grid/1"
THROUGHPUT: Final = "output_tokens_per_s_per_gpu"
COST: Final = "cost_per_million_output_tokens"
Mark = Literal["today", "pareto", "knee", "chosen"]
EVEN: Final = 0.02
"""Values that differ by no more are equal."""


class GridPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A combination of values, forecast."""

    name: str
    """Differences from today's setting in words; empty: today's."""
    changes: int
    """Axes on which it differs from today's setting."""
    same_load: bool
    """Its traffic is that of today's setting: rate, prompts, events."""
    settings: dict[str, int | float | str | bool | None]
    """Value of every axis, also of those that the grid leaves as they are."""
    gpus: int
    members: int
    measures: dict[str, Span]
    effects: dict[str, Span]
    """By measure, the ratio to today's, member by member. Empty: with one member there is none."""
    within: float | None
    """Share of the members that keep every SLO. Null: there is none."""
    meets: bool
    """Enough members keep every SLO, every request is served, and the load is not known to saturate the engines."""
    utilization: float | None
    """Null with one member."""
    saturated: bool | None
    warnings: list[str]
    """Conditions beyond what was fitted."""
    assumptions: list[str] = []
    """Of its layout: no capture confirms them."""
    marks: list[Mark] = []

    def middle(self, measure: str) -> float | None:
        return self.measures[measure].middle


class GridSweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep's result; the Parquet file has every point."""

    schema: Literal["kvtape-grid/1"] = SCHEMA
    trace: str
    trace_digest: str
    model_digest: str
    verdict: str
    """Validation of the model, on this trace or another, and its error on this very capture."""
    trusted: bool = True
    """False: that error is larger than the gates' limits."""
    paced: bool
    requests: int
    seed: int
    axes: list[str]
    """Axes with several values, in order."""
    latency: str
    """Measure beside throughput in the Pareto set."""
    slos: list[str]
    """Empty: the limit is today's latency."""
    confidence: float
    gpu_price: float | None
    """Of a GPU and hour. Null: not told, and cost is null."""
    count: int
    """Points, today's included; ``members`` of a map point and of a refined one."""
    refined: int
    members: int
    notes: list[str]
    today: GridPoint
    chosen: GridPoint | None
    """Cheapest point at today's load that keeps the limits. Null: none does."""
    frontier: list[GridPoint]
    """Pareto set by throughput per GPU, without saturated points."""
    slices: dict[str, list[GridPoint]]
    """By axis, points that differ from the chosen one, or from today's, on this axis alone."""
    cloud: list[tuple[float, float]]
    """Throughput per GPU and latency of points beside the frontier, at most some thousands."""


def latency_title(sweep: GridSweep) -> str:
    """Return the latency's name as a table has it: ``TTFT p90``."""
    metric, *cohort, level = sweep.latency.split(".")
    of = f", {cohort_title(cohort[0]).lower()}" if cohort and cohort[0] != "all" else ""
    return f"{metric.upper() if metric != 'queue' else metric} {level}{of}"


def headlines(sweep: GridSweep) -> list[str]:
    """Return what to change, the knee, and the number of members behind each number."""
    advice = _advice(sweep) if sweep.trusted else f"{_advice(sweep)[:-1]}{NOT_TRUSTED}."
    return [advice, *_knee(sweep), _members(sweep)]


def _advice(sweep: GridSweep) -> str:
    limit = wording.listed(sweep.slos) if sweep.slos else "today's latency"
    today, chosen = sweep.today, sweep.chosen
    if chosen is None:
        points = [point for point in sweep.frontier if point.same_load]
        best = min(points, key=lambda point: point.middle(sweep.latency) or 0.0, default=today)
        return f"No point keeps {limit}: the fastest, {_named(best)}, has {_latency(sweep, best)}."
    if chosen.name == today.name:
        return f"Change nothing: no point keeps {limit} for less than today's, with {_latency(sweep, today)}."
    effect = chosen.effects.get(sweep.latency)
    beside = f" ({_effect(effect)})" if effect is not None else ""
    return (
        f"Change to {chosen.name}: {_latency(sweep, chosen)} beside today's {_milliseconds(sweep, today)}{beside}, "
        f"{_money(sweep, chosen)}."
    )


def _named(point: GridPoint) -> str:
    return point.name or "today's"


def _latency(sweep: GridSweep, point: GridPoint) -> str:
    return f"{latency_title(sweep)} {_milliseconds(sweep, point)}"


def _milliseconds(sweep: GridSweep, point: GridPoint) -> str:
    return f"{span_text(point.measures[sweep.latency], wording.duration_ms)} ms"


def _effect(ratio: Span) -> str:
    return span_text(ratio, lambda value: wording.signed_percent(value - 1.0))


def _money(sweep: GridSweep, point: GridPoint) -> str:
    """Return cost, else throughput per GPU, and its change from today's."""
    priced = sweep.gpu_price is not None
    name = COST if priced else THROUGHPUT
    value, before = point.middle(name), sweep.today.middle(name)
    said = span_text(point.measures[name], reading(name))
    said = f"{said} per million output tokens" if priced else f"{said} output tokens/s per GPU"
    if value is None or not before or abs(value / before - 1.0) <= EVEN:
        return f"{said} as today"
    return f"{said}, {wording.signed_percent(value / before - 1.0)}"


def _knee(sweep: GridSweep) -> Iterator[str]:
    knee = next((point for point in sweep.frontier if "knee" in point.marks), None)
    if knee is not None:
        yield f"The knee of the Pareto set is {_named(knee)}: {_latency(sweep, knee)}, {_money(sweep, knee)}."


def _members(sweep: GridSweep) -> str:
    return (
        f"{sweep.count:,} points with one member each; {sweep.refined:,} of them, today's and those near the frontier, "
        f"with {sweep.members}: brackets hold 90 % of these."
    )


def reading(name: str) -> Callable[[float], str]:
    """Return the wording of a measure's numbers."""
    if name == COST:
        return lambda value: f"{value:.3g}"
    if name == "hit_rate":
        return lambda value: f"{value:.1%}"
    if name.startswith("output_tokens"):
        return wording.rate
    return wording.duration_ms


def point_table(sweep: GridSweep) -> TextTable:
    """Return today's point and the Pareto set, the fastest first."""
    cohort = sweep.latency.split(".")[1] if sweep.latency.startswith(TTFT) else "all"
    columns = {
        **{f"{TTFT}.{cohort}.{level}": f"TTFT {level} ms" for level in ("p50", "p90", "p99")},
        **({} if sweep.latency.startswith(TTFT) else {sweep.latency: f"{latency_title(sweep)} ms"}),
        "hit_rate": "hit rate",
        THROUGHPUT: "tok/s/GPU",
        **({} if sweep.gpu_price is None else {COST: "cost/Mtok"}),
    }
    rows = [
        [
            " ".join(mark for mark in point.marks if mark != "pareto") or "–",
            *(setting_text(point.settings[axis]) for axis in sweep.axes),
            str(point.gpus),
            *(span_text(point.measures[name], reading(name)) for name in columns),
            wording.NOTHING if point.utilization is None else f"{point.utilization:.0%}",
            str(point.members),
        ]
        for point in table_points(sweep)
    ]
    return TextTable(["", *sweep.axes, "GPUs", *columns.values(), "utilization", "members"], rows)


def table_points(sweep: GridSweep) -> Sequence[GridPoint]:
    """Return today's point, the chosen one and the frontier, each once."""
    chosen = [] if sweep.chosen is None else [sweep.chosen]
    return list({point.name: point for point in (sweep.today, *chosen, *sweep.frontier)}.values())


def setting_text(value: float | str | bool | None) -> str:
    """Return an axis's value as a table has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return wording.NOTHING if value in (None, "") else value if isinstance(value, str) else f"{value:,g}"


def sweep_lines(sweep: GridSweep) -> Iterator[str]:
    """Yield the result for a terminal."""
    yield from headlines(sweep)
    yield sweep.verdict
    yield from (f"note: {note}" for note in sweep.notes)
    yield from ("", *point_table(sweep).lines)
    yield from (f"warning: {_named(point)}: {said}" for point in table_points(sweep) for said in point.warnings)
    yield from (f"assumed: {_named(point)}: {said}" for point in table_points(sweep) for said in point.assumptions)
