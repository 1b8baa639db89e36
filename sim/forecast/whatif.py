"""``sim what-if``: forecast a captured load on another cache, at another rate, under other settings."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from measure import number_format
from measure.cohorts import MAIN, cohort_title
from measure.thresholds import TOO_UNCERTAIN, Threshold
from report.grid import panels
from report.grid.points import LEVELS, THROUGHPUT, effect_text, reading_of, span_text, value_text
from report.output import page_path, put_page
from report.pages import figures
from report.pages.panels import Check, Figure, Page, Panel
from sim.forecast import points
from sim.forecast import summary as summing
from sim.forecast.captured import Captured, plan_as
from sim.forecast.limits import KEYS, evaluate, parse_limit, ttft
from sim.forecast.points import ForecastConfig
from sim.forecast.results import EffectGate, ForecastGrid, ForecastPoint, Kind
from sim.forecast.scenarios import (
    AS_CAPTURED,
    SCENARIO_FLAGS,
    Scenario,
    parse_base,
    scenarios_of,
)
from tracefile.commandline.exit_codes import verdict_code
from tracefile.commandline.progress import counted
from tracefile.records.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Scenarios of a capture."""

    scenarios: tuple[Scenario, ...] = ()
    base: Scenario = AS_CAPTURED
    """Forecast that effects are against."""
    gates: tuple[Threshold, ...] = ()


def run(arguments: argparse.Namespace) -> int:
    base = AS_CAPTURED if arguments.base is None else parse_base(arguments.base)
    gates = tuple(parse_limit("--gate", text, KEYS) for text in arguments.gate)
    asked = WhatIf(scenarios=tuple(scenarios_of(arguments, base)), base=base, gates=gates)
    config = points.config_of(arguments)
    html = page_path(arguments, [config.trace, config.model])
    result = forecast_scenarios(config, asked)
    put_page(what_if_page(result), result, as_json=arguments.json, html=html)
    failed = any(gate.sure and not gate.passed for gate in result.gates)
    return verdict_code(failed=failed, uncertain=not all(gate.sure for gate in result.gates))


def forecast_scenarios(config: ForecastConfig, asked: WhatIf) -> ForecastGrid:
    """Return the points: the measured one, the capture's forecast, the base if it is another, the scenarios."""
    forecast = points.PointForecast(config)
    captured = forecast.captured
    measured = summing.measured_point(captured, forecast.cohorts)
    plans = list(_plans(captured, asked, measured))
    runs = counted(range(len(plans) * config.members), "forecasts")
    made, capture = [] if measured is None else [measured], None
    base: Mapping[str, Any] | None = None
    for kind, name, scenario in plans:
        values = forecast((scenario, config.members), procs=None, done=lambda: next(runs, None))
        against = base if kind == "scenario" else None
        point = points.make_point(name, scenario.differences, values, base=against, kind=kind, curves=values.curves)
        if kind == "capture" and measured is not None:
            point = capture = summing.with_errors(point, measured)
        base = base if kind == "scenario" else values.values
        made.append(point)
    about = forecast.about(capture)
    about["notes"] += _notes(captured, asked)
    result = ForecastGrid(
        axes=[],
        throughput=THROUGHPUT,
        columns=["hit_rate", THROUGHPUT, "utilization", "itl.p50", "e2e.p50", "unserved"],
        points=made,
        gates=evaluate(asked.gates, made),
        **about,
    )
    return msgspec.structs.replace(result, headlines=[headline(result)])


def _plans(captured: Captured, asked: WhatIf, measured: ForecastPoint | None) -> Iterator[tuple[Kind, str, Scenario]]:
    """Yield the forecasts to make; of the capture only if it was measured, or nothing else is the base.

    Raises InputError for a load that no engine could have, or that serves no request.
    """
    other = asked.base.name_beside(AS_CAPTURED)
    plans: list[tuple[Kind, str, Scenario]] = []
    if measured is not None or not other:
        plans.append(("capture", "forecast of the capture", AS_CAPTURED))
    if other:
        plans.append(("base", f"base: {other}", asked.base))
    plans += [("scenario", scenario.name_beside(asked.base), scenario) for scenario in asked.scenarios]
    for kind, name, scenario in plans:
        load = plan_as(name, captured, scenario)
        if not load.serves:
            blocks = load.engine.num_gpu_blocks
            raise InputError(f"{name}: {blocks} blocks hold no request; expected more --num-gpu-blocks")
        yield kind, name, scenario


def _notes(captured: Captured, asked: WhatIf) -> Iterator[str]:
    if not asked.scenarios:
        yield f"nothing differs: give {SCENARIO_FLAGS}"
    if captured.paced:
        yield "later turns wait for the outputs before them, then think as long as recorded; a rate multiplies sessions"
    else:
        yield "open loop: every request comes at its recorded offset, divided by the rate"


def headline(result: ForecastGrid) -> str:
    """Return the best scenario and its effect on TTFT p90 in a sentence, in the cohort that shows a cache."""
    cohort = MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]
    name = ttft(cohort, "p90")
    base = next(point for point in reversed(result.points) if point.kind != "scenario")
    title, known = f"TTFT p90 ({cohort_title(cohort).lower()})", f"{base.name} {value_text(base, name)} ms."
    scenarios = [point for point in result.points if point.kind == "scenario"]
    if not scenarios:
        return f"{title}: {known}"
    best = min(scenarios, key=lambda point: (point.saturated, point.middle(name) or float("inf")))
    state = "best" if (best.middle(name) or float("inf")) < (base.middle(name) or 0.0) else "nearest"
    state += ", saturated" if best.saturated else ""
    return f"{title}: {best.name} is {state}, {value_text(best, name)} ms ({effect_text(best, name)}); {known}"


MOST_DRAWN: Final = 8
"""Curves in one figure, the palette's colours."""


def what_if_page(result: ForecastGrid) -> Page:
    """Return TTFT survival and a table of each cohort, then engine numbers."""
    page = panels.grid_page(result, "sim what-if", "docs/what-if.md")
    lead = (
        f"{result.cohorts['all']:,} requests, {result.members} members: brackets hold 90 % of them, effects are paired"
    )
    drawn = [_survival_panel(result, cohort) for cohort in MAIN if cohort in result.cohorts]
    return replace(
        page,
        leads=[lead, *page.leads],
        checks=[_check(gate) for gate in result.gates],
        panels=[*drawn, *page.panels],
        slots={point.name: slot for slot, point in enumerate(result.points[:MOST_DRAWN])},
        dashed=[point.name for point in result.points if point.kind != "measured"],
    )


def _check(gate: EffectGate) -> Check:
    reading = number_format.factor if gate.key == "ratio" else reading_of(gate.measure)
    value = "not known" if gate.span is None else span_text(gate.span, reading)
    state = "passed" if gate.passed else "FAILED" if gate.sure else f"{TOO_UNCERTAIN}, members differ"
    return Check("gate", state, f"{gate.gate}: {value} with {gate.point}")


def _survival_panel(result: ForecastGrid, cohort: str) -> Panel:
    title = f"TTFT, {cohort_title(cohort).lower()}"
    return Panel(
        chapter=title,
        title=title,
        id="survival-" + "".join(letter if letter.isalnum() else "-" for letter in cohort),
        figure=survival_curves(result.points, cohort),
        caption=f"TTFT survival of {result.cohorts[cohort]:,} requests. Solid: measured; dashed: forecasts, with their "
        "members' band.",
        tables=[panels.point_table(result.points, [ttft(cohort, level) for level in LEVELS], [])],
    )


def survival_curves(drawn_points: Sequence[ForecastPoint], cohort: str) -> Figure:
    """Draw the points' curves: the measured and the base's wide and below, so that none hides an equal curve."""
    drawn = []
    for slot, point in enumerate(drawn_points[:MOST_DRAWN]):
        curve, measured = point.curves.get(cohort), point.kind == "measured"
        if curve is not None:
            shown = figures.Curve(*map(np.array, (curve.time_ms, curve.survival, curve.low, curve.high)))
            shown = replace(shown, low=np.full(len(curve.low), np.nan)) if measured else shown
            width, dash = (3.0, "solid") if measured else (2.0 if point.kind == "scenario" else 4.5, figures.DASHED)
            drawn.append(figures.Survival(name=point.name, curve=shown, slot=slot, width=width, dash=dash))
    return figures.survival_figure(drawn, "TTFT (ms)", "still without a first token")
