"""``sim sweep``: forecast latency and throughput of a capture at all points of a grid, on all cores.

Each point is forecast once; today's setting, the Pareto set and the choice then get an ensemble. The numbers of a point
depend on its scenario alone.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any, Final

import msgspec
import numpy as np

from measure import number_format
from measure.metrics.flags import checked_gpus
from measure.thresholds import Threshold
from report.grid import panels
from report.grid.points import COST, PER_GPU, THROUGHPUT, Setting, pareto_set, title_of, value_text
from report.output import page_path, put_page
from sim.forecast import points
from sim.forecast.captured import Captured, plan_as
from sim.forecast.grid import Grid, read_grid
from sim.forecast.limits import parse_limit
from sim.forecast.points import ForecastConfig, PointValues
from sim.forecast.results import NOT_TRUSTED, ForecastGrid, ForecastPoint
from sim.forecast.scenarios import AXES, Scenario
from tracefile.commandline.processes import results
from tracefile.commandline.progress import counted
from tracefile.records.errors import InputError

EVEN: Final = 0.02
"""Largest relative difference of equal values."""
LEAST_MS: Final = 1e-3
"""Latency in place of 0, which has no logarithm."""
MOST_REFINED: Final = 24
"""Most points with all members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Latency limits of the chosen point, and prices."""

    slos: tuple[Threshold, ...] = ()
    gpu_price: float | None = None
    gpus: int = 1
    """GPUs of an engine."""
    procs: int | None = None


def run(arguments: argparse.Namespace) -> int:
    grid, choice, config = read_grid(arguments.grid), _choice(arguments), points.config_of(arguments)
    html = page_path(arguments, [grid.path, config.trace, config.model])
    result = sweep(config, grid, choice)
    put_page(panels.grid_page(result, "sim sweep", "docs/capacity.md"), result, as_json=arguments.json, html=html)
    return 0 if result.marked("chosen") is not None else 1


def _choice(arguments: argparse.Namespace) -> Choice:
    price = arguments.gpu_price
    if price is not None and not 0.0 < price < float("inf"):
        raise InputError(f"--gpu-price: {price:g}; expected a price above 0")
    if arguments.procs is not None and arguments.procs < 1:
        raise InputError(f"--procs: {arguments.procs}; expected 1 or more")
    slos = tuple(parse_limit("--slo", text) for text in arguments.slo)
    return Choice(slos=slos, gpu_price=price, gpus=checked_gpus(arguments.gpus) or 1, procs=arguments.procs)


def sweep(config: ForecastConfig, grid: Grid, choice: Choice) -> ForecastGrid:
    """Forecast latency and throughput of all points; then ensembles of today's, chosen and Pareto points."""
    work = points.PointForecast(config, "--slo", choice.slos)
    base, latency = _with_captured_values(work.captured, grid), points.latency_of(choice.slos)
    scenarios = {key_of(scenario): scenario for scenario in (*grid.scenarios, base)}
    settings = {key: _settings(work.captured, scenario, grid) for key, scenario in scenarios.items()}
    today, forecasts = key_of(base), dict[str, ForecastPoint]()

    def chosen() -> str:
        """Return the point that meets the SLOs, or else today's latency, for the least; empty: no point does."""
        return choice_of(forecasts, latency, None if choice.slos else forecasts[today].middle(latency)) or ""

    tasks = [(base, config.members), *((scenario, 1) for key, scenario in scenarios.items() if key != today)]
    while tasks:
        done = counted(range(len(tasks)), "points")
        for scenario, values in _forecasts(work, tasks, choice.procs):
            key = key_of(scenario)
            forecasts[key] = _point(scenario, base, settings[key], values, choice)
            next(done, None)
        next(done, None)
        single = [key for key in (chosen(), *pareto_of(forecasts, latency)) if key and forecasts[key].members == 1]
        refined = sum(point.members > 1 for point in forecasts.values())
        tasks = [(scenarios[key], config.members) for key in dict.fromkeys(single)][: max(MOST_REFINED - refined, 0)]
    marks = {"today": [today], "chosen": [chosen()], "pareto": pareto_of(forecasts, latency)}
    result = ForecastGrid(
        axes=[axis.name for axis, values in grid.axes.items() if len(values) > 1],
        latency=latency,
        throughput=PER_GPU,
        columns=[latency, "hit_rate", PER_GPU, *([] if choice.gpu_price is None else [COST]), "utilization"],
        points=[
            points.with_mark(forecasts[key], *(mark for mark, keys in marks.items() if key in keys))
            for key in scenarios
        ],
        limits=[slo.text for slo in choice.slos],
        gpu_price=choice.gpu_price,
        **work.about(),
    )
    return msgspec.structs.replace(result, headlines=headlines(result))


def _forecasts(
    work: points.PointForecast, tasks: Sequence[points.Task], procs: int | None
) -> Iterator[tuple[Scenario, PointValues]]:
    """Yield forecasts: single members in parallel, then each ensemble with its members in parallel."""
    for (scenario, _), values in results(work, [task for task in tasks if task[1] == 1], procs=procs):
        yield scenario, values
    for scenario, members in tasks:
        if members > 1:
            yield scenario, work((scenario, members), procs=procs)


def key_of(scenario: Scenario) -> str:
    return json.dumps(asdict(scenario), sort_keys=True)


def _point(
    scenario: Scenario, base: Scenario, settings: tuple[dict[str, Setting], int], values: PointValues, choice: Choice
) -> ForecastPoint:
    gpus = settings[1] * choice.gpus
    values.values[PER_GPU] = values.values[THROUGHPUT] / gpus
    if choice.gpu_price is not None:
        with np.errstate(divide="ignore"):
            values.values[COST] = choice.gpu_price / 3600.0 * 1e6 / values.values[PER_GPU]
    return points.make_point(
        scenario.name_beside(base),
        settings[0],
        values,
        choice.slos,
        gpus=gpus,
        changes=sum(axis.value_in(scenario) != axis.value_in(base) for axis in AXES),
        same_load=_load(scenario) == _load(base),
    )


Coordinates = tuple[float, float]
"""Logarithms of throughput, in steps of ``EVEN``, and of latency."""


def _coordinates(forecasts: Mapping[str, ForecastPoint], latency: str) -> dict[str, Coordinates]:
    """Return log throughput and log latency of points, without saturated points and points that drop requests."""
    coordinates = {}
    for key, point in forecasts.items():
        value, wait_ms = point.middle(PER_GPU), point.middle(latency)
        if value and wait_ms is not None and not (point.saturated or point.middle("unserved")):
            coordinates[key] = round(log(value) / log(1.0 + EVEN)) * log(1.0 + EVEN), log(max(wait_ms, LEAST_MS))
    return coordinates


def pareto_of(forecasts: Mapping[str, ForecastPoint], latency: str) -> list[str]:
    """Return the Pareto set by throughput per GPU, fastest first; of equal points, the fewest changes."""
    coordinates = _coordinates(forecasts, latency)
    efficient = dict(zip(coordinates, pareto_set([(x, -y) for x, y in coordinates.values()]), strict=True))
    best: dict[Coordinates, str] = {}
    for key in sorted(coordinates, key=lambda key: forecasts[key].changes):
        if efficient[key]:
            best.setdefault(coordinates[key], key)
    return [best[position] for position in sorted(best)]


def choice_of(forecasts: Mapping[str, ForecastPoint], latency: str, limit_ms: float | None) -> str | None:
    """Return the cheapest point at today's load that meets its SLOs and ``limit_ms``; then the lowest latency.

    Of equal points, the fewest changes. None: no point qualifies.
    """
    slowest = np.inf if limit_ms is None else log(max(limit_ms, LEAST_MS) * (1.0 + EVEN))
    waits = {
        key: wait
        for key, (_, wait) in _coordinates(forecasts, latency).items()
        if forecasts[key].meets is not False and forecasts[key].same_load and wait <= slowest
    }
    if not waits:
        return None
    value_of = {key: forecasts[key].middle(PER_GPU) or 0.0 for key in waits}
    cheap = [key for key in waits if value_of[key] >= max(value_of.values()) / (1.0 + EVEN)]
    fastest = min(waits[key] for key in cheap) + log(1.0 + EVEN)
    return min((key for key in cheap if waits[key] <= fastest), key=lambda key: (forecasts[key].changes, waits[key]))


def headlines(grid: ForecastGrid) -> list[str]:
    limit = number_format.listed(grid.limits) if grid.limits else "today's latency"
    today, chosen = grid.marked("today"), grid.marked("chosen")
    assert today is not None
    if chosen is None:
        advice = f"No point keeps {limit}; today: {_numbers(grid, today)}"
    elif chosen.name == today.name:
        advice = f"Change nothing: no point keeps {limit} for less than today's. {_numbers(grid, today)}"
    else:
        advice = f"Change to {chosen.name}: {_numbers(grid, chosen)}; today: {_numbers(grid, today)}"
    refined = sum(point.members > 1 for point in grid.points)
    members = f"{len(grid.points):,} points with one member each; {refined:,} with {grid.members}: brackets hold 90 %."
    return [advice + ("." if grid.trusted else f"{NOT_TRUSTED}."), members]


def _numbers(grid: ForecastGrid, point: ForecastPoint) -> str:
    names = (grid.latency, PER_GPU if grid.gpu_price is None else COST)
    return ", ".join(f"{title_of(name)} {value_text(point, name)}" for name in names)


def _settings(captured: Captured, scenario: Scenario, grid: Grid) -> tuple[dict[str, Setting], int]:
    load = plan_as(f"{grid.path}: {scenario.name}", captured, scenario)
    fleet = load.fleet
    replicas = 1 if fleet is None else len(fleet.names)
    values = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    values |= asdict(load.engine) | asdict(load.deployment)
    values |= {
        "replicas": replicas,
        "route": None if fleet is None else fleet.route,
        "events": ", ".join(scenario.events) or None,
        "cold_prompts": scenario.cold_prompts or captured.cold,
    }
    return {axis.name: values[axis.target_field] for axis in grid.axes}, replicas


def _with_captured_values(captured: Captured, grid: Grid) -> Scenario:
    """Return the grid's base with explicit values on all axes, to recognise an equal point."""
    (settings, _), base = _settings(captured, grid.base, grid), grid.base
    for axis in grid.axes:
        if axis.value_in(base) is None and settings[axis.name] is not None:
            base = axis.put(base, settings[axis.name])
    return base


def _load(scenario: Scenario) -> tuple[Any, ...]:
    return scenario.rate, scenario.cold_prompts, scenario.events
