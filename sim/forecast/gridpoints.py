"""Points of a grid: forecasts as rows, those to refine, the choice among them, and all of them as a table."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from math import log
from typing import Any, Final

import msgspec
import numpy as np

from measure.cohorts import ALL, MAIN
from measure.metrics.columns import Column, Table
from measure.runs import UNKNOWN
from measure.thresholds import Threshold
from report.pages.figures import thinned
from report.pages.whatif import LEVELS, Span, ttft
from report.sweeps.grid import COST, EVEN, THROUGHPUT, GridPoint, GridSweep, Mark
from report.sweeps.pareto import pareto_set
from sim.engine.deployment import Deployment
from sim.forecast.captured import Captured, plan_as
from sim.forecast.effectgates import measure_name
from sim.forecast.grid import Grid
from sim.forecast.scenarios import AXES, Scenario
from sim.forecast.summary import span_of
from tracefile.records.arrays import FloatArray

NEAR = 1.1
"""Latency over the frontier's, at the same throughput or more, up to which a point may belong to it."""
LEAST_MS = 1e-3
"""Latency of no wait at all, which has no logarithm."""


class Frontier:
    """Points by throughput per GPU and latency without ``repeated`` ones; a throughput within ``EVEN`` is equal."""

    def __init__(self, points: Sequence[GridPoint], latency: str, repeated: Set[int] = frozenset()) -> None:
        self.points, self._latency = points, latency
        found = [None if at in repeated else self._place(point) for at, point in enumerate(points)]
        self._known = [at for at, place in enumerate(found) if place is not None]
        self._places = {at: place for at, place in enumerate(found) if place is not None}

    def _place(self, point: GridPoint) -> tuple[float, float] | None:
        """Return the logarithms, throughput in steps of ``EVEN``; None: saturated, or not all is served."""
        value, wait_ms = point.middle(THROUGHPUT), point.middle(self._latency)
        if not value or wait_ms is None or point.saturated or point.middle("unserved"):
            return None
        return round(log(value) / log(1.0 + EVEN)) * log(1.0 + EVEN), log(max(wait_ms, LEAST_MS))

    def best(self) -> list[int]:
        """Return the Pareto set, the fastest first: of equal points the one with the fewest changes."""
        kept = pareto_set([(x, -y) for x, y in self._places.values()])
        by_place: dict[tuple[float, float], int] = {}
        for at in (at for at, is_kept in zip(self._known, kept, strict=True) if is_kept):
            other = by_place.setdefault(self._places[at], at)
            if self.points[at].changes < self.points[other].changes:
                by_place[self._places[at]] = at
        return [by_place[place] for place in sorted(by_place)]

    def knee(self) -> int | None:
        """Return the place farthest below the straight line through both ends; None: fewer than three in the set."""
        best = self.best()
        if len(best) < 3:
            return None
        x, y = np.array([self._places[at] for at in best]).T
        return best[int(np.argmax((x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / (y[-1] - y[0])))]

    def near(self) -> list[int]:
        """Return the points near the Pareto set, the nearest first."""
        found: list[tuple[float, int, int]] = []
        least = np.inf
        for at in sorted(self._known, key=lambda at: (-self._places[at][0], self._places[at][1])):
            least = min(least, self._places[at][1])
            beyond = self._places[at][1] - least
            if beyond <= log(NEAR):
                found.append((beyond, self.points[at].changes, at))
        return [at for *_, at in sorted(found)]

    def choice(self, limit_ms: float | None) -> int | None:
        """Return the cheapest point at today's load that meets its SLOs and ``limit_ms``; then the fastest.

        Among equal ones that with the fewest changes. None: no point does.
        """
        slowest = np.inf if limit_ms is None else log(max(limit_ms, LEAST_MS) * (1.0 + EVEN))
        kept = [
            at
            for at, (_, y) in self._places.items()
            if self.points[at].meets and self.points[at].same_load and y <= slowest
        ]
        if not kept:
            return None
        value_of = {at: self.points[at].middle(THROUGHPUT) or 0.0 for at in kept}
        least = max(value_of.values()) / (1.0 + EVEN)
        kept = [at for at in kept if value_of[at] >= least]
        fastest = min(self._places[at][1] for at in kept) + log(1.0 + EVEN)
        even = (at for at in kept if self._places[at][1] <= fastest)
        return min(even, key=lambda at: (self.points[at].changes, self._places[at][1], at))


MEASURES: Final = (
    *(THROUGHPUT, COST, "hit_rate", "requests_per_s", "output_tokens_per_s", "preemptions", "unserved"),
    *(ttft(cohort, level) for cohort in MAIN for level in LEVELS),
    *(f"{name}.{level}" for name in ("queue", "itl", "e2e") for level in LEVELS),
)
"""Measures of a point, in the order of the file's columns."""
_NOTHING: Final = Span(middle=None, low=None, high=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Limits that the chosen point keeps, and the price of a GPU and hour."""

    slos: tuple[Threshold, ...] = ()
    confidence: float = 0.9
    gpu_price: float | None = None
    gpus: int = 1
    """Of an engine."""

    @property
    def latency(self) -> str:
        """Measure beside throughput: of the first SLO on a time, else TTFT p90."""
        times = (measure_name(slo) for slo in self.slos if slo.unit == "ms")
        return next(times, ttft(ALL, "p90"))


def key_of(scenario: Scenario, members: int) -> str:
    """Return a name that no other forecast has."""
    return json.dumps([asdict(scenario), members], sort_keys=True)


class GridPoints:
    """All points of a grid and today's; ``put`` takes their forecasts."""

    def __init__(self, captured: Captured, grid: Grid, choice: Choice) -> None:
        self.base = _told(captured, grid)
        self.scenarios = list({key_of(one, 1): one for one in (*grid.scenarios, self.base)}.values())
        self._grid, self._choice = grid, choice
        self._place = {key_of(one, 1): at for at, one in enumerate(self.scenarios)}
        self._today = self._place[key_of(self.base, 1)]
        self._settings = [_settings(captured, scenario, grid) for scenario in self.scenarios]
        loads = [_load(scenario) == _load(self.base) for scenario in self.scenarios]
        self._same_load = loads if sum(loads) > 1 else [True] * len(loads)
        self._found: list[GridPoint | None] = [None] * len(loads)
        self._before: dict[str, FloatArray] = {}
        self._alone: list[bytes] = [b""] * len(loads)
        """Forecasts with one member."""

    def put(self, scenario: Scenario, members: int, told: Mapping[str, Any]) -> None:
        """Take a forecast; of a point with all members none with one. Today's is the first."""
        at = self._place[key_of(scenario, 1)]
        known = self._found[at]
        if members == 1:
            self._alone[at] = np.concatenate(list(told["values"].values())).tobytes()
        if known is not None and known.members > members:
            return
        choice, (settings, engines) = self._choice, self._settings[at]
        gpus = engines * choice.gpus
        values = {name: np.array(value) for name, value in told["values"].items()}
        values[THROUGHPUT] = values["output_tokens_per_s"] / gpus
        with np.errstate(divide="ignore"):
            values[COST] = (choice.gpu_price or np.nan) / 3600.0 * 1e6 / values[THROUGHPUT]
        if at == self._today:
            self._before = values
        kept = [slo.holds_each(values[measure_name(slo)]) for slo in choice.slos]
        within = float(np.mean(np.all(kept, axis=0))) if kept else None
        self._found[at] = GridPoint(
            name=scenario.name_beside(self.base),
            changes=sum(axis.value_in(scenario) != axis.value_in(self.base) for axis in AXES),
            same_load=self._same_load[at],
            settings=settings,
            gpus=gpus,
            members=members,
            measures={
                name: span_of(values[name], told["beyond"].get(name)) if name in values else _NOTHING
                for name in MEASURES
            },
            effects=dict(self._effects(values)) if members > 1 and at != self._today else {},
            within=within,
            meets=not told["saturated"]
            and not np.median(values["unserved"])
            and (within is None or within >= choice.confidence),
            assumptions=list(Deployment(**scenario.deployment).assumptions()),
            **{name: told[name] for name in ("utilization", "saturated", "warnings")},
        )

    def _effects(self, values: Mapping[str, FloatArray]) -> Iterator[tuple[str, Span]]:
        for name in MEASURES:
            if name in values:
                with np.errstate(divide="ignore", invalid="ignore"):
                    yield name, span_of(values[name] / self._before[name], None)

    @property
    def _points(self) -> list[GridPoint]:
        return [point for point in self._found if point is not None]

    def to_refine(self, most: int) -> list[Scenario]:
        """Return the points that get all members next: the choice, and those near the frontier, as far as allowed.

        Half of those left: with all members another point may be the choice, and is tested, too.
        """
        points, front = self._points, self._frontier()
        best, near = self._chosen(), front.near()
        wanted = [
            *([] if best is None else [best]),
            *front.best(),
            *sorted(near, key=lambda at: not points[at].same_load),
        ]
        room = max(most - sum(point.members > 1 for point in points) + 1, 0)
        return [self.scenarios[at] for at in dict.fromkeys(wanted) if points[at].members == 1][: -(-room // 2)]

    def _frontier(self) -> Frontier:
        return Frontier(self._points, self._choice.latency, self._repeated())

    def _repeated(self) -> set[int]:
        """Return points whose forecast is that of a point with as few changes or fewer, which stands for them."""
        kept: dict[tuple[bytes, int, bool], int] = {}
        for at, point in sorted(enumerate(self._points), key=lambda one: one[1].changes):
            kept.setdefault((self._alone[at], point.gpus, point.same_load), at)
        return set(range(len(self._points))).difference(kept.values())

    def _chosen(self) -> int | None:
        today = self._points[self._today].middle(self._choice.latency)
        return self._frontier().choice(None if self._choice.slos else today)

    def result(self, **about: Any) -> GridSweep:
        """Return the sweep with its points marked."""
        choice, points = self._choice, self.marked()
        chosen = next((point for point in points if "chosen" in point.marks), None)
        today = points[self._today]
        axes = [axis.name for axis, values in self._grid.axes.items() if len(values) > 1]
        places = [(point.middle(THROUGHPUT), point.middle(choice.latency)) for point in points if not point.marks]
        cloud = [(x, y) for x, y in places if x and y]
        return GridSweep(
            axes=axes,
            latency=choice.latency,
            slos=[slo.text for slo in choice.slos],
            confidence=choice.confidence,
            gpu_price=choice.gpu_price,
            count=len(points),
            refined=sum(point.members > 1 for point in points),
            today=today,
            chosen=chosen,
            frontier=[points[at] for at in self._frontier().best()],
            slices=dict(self._slices(points)),
            cloud=[cloud[at] for at in thinned(len(cloud)).tolist()],
            **about,
        )

    def _slices(self, points: Sequence[GridPoint]) -> Iterator[tuple[str, list[GridPoint]]]:
        chosen = self._chosen()
        center = self.scenarios[self._today if chosen is None else chosen]
        for axis, values in self._grid.axes.items():
            along = {key_of(axis.put(center, value), 1) for value in (*values, axis.value_in(self.base))}
            own = [point for key, point in zip(self._place, points, strict=True) if key in along]
            if len(own) > 1:
                yield axis.name, own

    def marked(self) -> list[GridPoint]:
        """Return all points in the grid's order, with their marks."""
        front = self._frontier()
        places: dict[Mark, list[int | None]] = {
            "today": [self._today],
            "chosen": [self._chosen()],
            "knee": [front.knee()],
            "pareto": list(front.best()),
        }
        marks_of = [[mark for mark, own in places.items() if at in own] for at in range(len(self._points))]
        return [
            msgspec.structs.replace(point, marks=marks) if marks else point
            for point, marks in zip(self._points, marks_of, strict=True)
        ]

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the choice must know."""
        points, front, chosen = self._points, self._frontier(), self._chosen()
        single = sum(points[at].members == 1 for at in dict.fromkeys([*front.best(), *front.near()]))
        if single:
            yield f"{single:,} points near the frontier have one member: --refine says how many may have more"
        if chosen is not None and points[chosen].members == 1:
            yield "the chosen point has one member: more --refine would test it"
        if len({_load(scenario) for scenario in self.scenarios}) > 1:
            among = "all, as today's load has one point" if all(self._same_load) else "points at today's load"
            yield f"loads differ: the choice is among {among}, the Pareto set among all"

    def table(self) -> Table:
        """Return a row for each point, today's last if the grid has it not; always the same columns."""
        points = self.marked()
        columns: dict[str, Column] = {}
        for axis in AXES:
            columns[axis.own_field] = _column([point.settings[axis.name] for point in points])
        columns["gpus"] = np.array([point.gpus for point in points])
        columns["members"] = np.array([point.members for point in points])
        for mark in ("today", "pareto", "knee", "chosen"):
            columns[mark] = np.array([mark in point.marks for point in points])
        columns["meets"] = np.array([point.meets for point in points])
        columns["utilization"] = _floats([point.utilization for point in points])
        columns["saturated"] = _floats([point.saturated for point in points])
        for name in MEASURES:
            spans = [point.measures[name] for point in points]
            for end in ("middle", "low", "high"):
                columns[_heading(name, end)] = _floats([_end(span, end) for span in spans])
        return columns


def _settings(captured: Captured, scenario: Scenario, grid: Grid) -> tuple[dict[str, Any], int]:
    """Return the value of every axis, and the GPUs of one for an engine. Raises InputError naming grid and point."""
    load = plan_as(f"{grid.path}: {scenario.name}", captured, scenario)
    engine, fleet, deployment = load.engine, load.fleet, load.deployment
    replicas = 1 if fleet is None else len(fleet.names)
    told = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    told |= asdict(engine) | asdict(deployment)
    told |= {
        "replicas": replicas,
        "route": None if fleet is None else fleet.route,
        "events": ", ".join(scenario.events) or None,
        "cold_prompts": scenario.cold_prompts or captured.cold,
    }
    return {axis.name: told[axis.own_field] for axis in AXES}, replicas


def _told(captured: Captured, grid: Grid) -> Scenario:
    """Return the grid's base with its own value on every axis, so that a point equal to it is it."""
    (settings, _), base = _settings(captured, grid.base, grid), grid.base
    for axis in grid.axes:
        if axis.value_in(base) is None and settings[axis.name] is not None:
            base = axis.put(base, settings[axis.name])
    return base


def _load(scenario: Scenario) -> tuple[Any, ...]:
    return scenario.rate, scenario.cold_prompts, scenario.events


def _heading(measure: str, end: str) -> str:
    """Return a column's name: ``ttft_all_p90_ms``, and with ``_low`` or ``_high`` an end of its interval."""
    name = measure.replace("+", "_and_later").replace(".", "_")
    unit = "_ms" if measure.split(".", maxsplit=1)[0] in ("ttft", "queue", "itl", "e2e") else ""
    return f"{name}{unit}" + ("" if end == "middle" else f"_{end}")


def _end(span: Span, end: str) -> float | None:
    """Return the middle or an end of an interval, infinite past the end of the load."""
    value: float | None = getattr(span, end)
    return np.inf if value is None and (span.beyond is not None or span.middle is not None) else value


def _column(values: Sequence[Any]) -> Column:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {str}:
        return list(values)
    if kinds <= {int}:
        return np.array([UNKNOWN if value is None else value for value in values])
    return np.array(values)


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values])
