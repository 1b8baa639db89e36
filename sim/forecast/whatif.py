"""``sim what-if``: forecast latency of a captured load on another cache, rate or engine setting."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from measure import number_format
from measure.cohorts import MAIN, cohort_title
from measure.number_format import NOTHING
from measure.thresholds import TOO_UNCERTAIN, Threshold
from report.grid import panels
from report.grid.points import LEVELS, THROUGHPUT, effect_text, reading_of, span_text, title_of, value_text
from report.output import page_path, put_page
from report.pages import figures
from report.pages.panels import Check, Figure, Page, Panel, Table
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
    request = WhatIf(scenarios=tuple(scenarios_of(arguments, base)), base=base, gates=gates)
    config = points.config_of(arguments)
    html = page_path(arguments, [config.trace, config.model])
    result = forecast_scenarios(config, request)
    put_page(what_if_page(result), result, as_json=arguments.json, html=html, verbose=arguments.verbose)
    failed = any(gate.sure and not gate.passed for gate in result.gates)
    return verdict_code(failed=failed, uncertain=not all(gate.sure for gate in result.gates))


def forecast_scenarios(config: ForecastConfig, request: WhatIf) -> ForecastGrid:
    """Return the points: measured, forecast of the capture, another base, scenarios (latency, throughput)."""
    forecast = points.PointForecast(config)
    captured = forecast.captured
    measured = summing.measured_point(captured, forecast.cohorts)
    plans = list(_plans(captured, request, measured))
    runs = counted(range(len(plans) * config.members), "forecasts")
    forecasts, capture = [] if measured is None else [measured], None
    base: Mapping[str, Any] | None = None
    for kind, name, scenario in plans:
        values = forecast((scenario, config.members), procs=None, done=lambda: next(runs, None))
        against = base if kind == "scenario" else None
        point = points.make_point(name, scenario.differences, values, base=against, kind=kind, curves=values.curves)
        if kind == "capture" and measured is not None:
            point = capture = summing.with_errors(point, measured)
        base = base if kind == "scenario" else values.values
        forecasts.append(point)
    about = forecast.about(capture)
    about["notes"] += _notes(captured, request)
    result = ForecastGrid(
        axes=[],
        throughput=THROUGHPUT,
        columns=["hit_rate", THROUGHPUT, "utilization", "itl.p50", "e2e.p50", "unserved"],
        points=forecasts,
        gates=evaluate(request.gates, forecasts),
        **about,
    )
    return msgspec.structs.replace(result, headlines=[headline(result)])


def _plans(captured: Captured, request: WhatIf, measured: ForecastPoint | None) -> Iterator[tuple[Kind, str, Scenario]]:
    """Yield the forecasts to run; of the capture only if measured, or if it is the base.

    Raises InputError for an invalid setting, or too few KV cache blocks for any request.
    """
    other = request.base.name_beside(AS_CAPTURED)
    plans: list[tuple[Kind, str, Scenario]] = []
    if measured is not None or not other:
        plans.append(("capture", "forecast of the capture", AS_CAPTURED))
    if other:
        plans.append(("base", f"base: {other}", request.base))
    plans += [("scenario", scenario.name_beside(request.base), scenario) for scenario in request.scenarios]
    for kind, name, scenario in plans:
        load = plan_as(name, captured, scenario)
        if not load.serves:
            blocks = load.engine.num_gpu_blocks
            raise InputError(f"{name}: {blocks} blocks hold no request; expected more --num-gpu-blocks")
        yield kind, name, scenario


def _notes(captured: Captured, request: WhatIf) -> Iterator[str]:
    if not request.scenarios:
        yield f"no scenario: give {SCENARIO_FLAGS}"
    if captured.paced:
        yield "closed loop: later turns wait for output and think time before; --rate scales session arrivals"
    else:
        yield "open loop: requests arrive at their recorded offsets, divided by --rate"


def _headline_cohort(result: ForecastGrid) -> str:
    """Return the cohort where a prefix cache shows: later turns, else all requests."""
    return MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]


def _best_first(result: ForecastGrid, measure: str) -> list[ForecastPoint]:
    """Return the scenarios by latency, saturated scenarios last."""
    scenarios = [point for point in result.points if point.kind == "scenario"]
    return sorted(scenarios, key=lambda point: (point.saturated, point.middle(measure) or np.inf))


def headline(result: ForecastGrid) -> str:
    """Return the best scenario and its effect on TTFT p90, in the cohort where the prefix cache shows."""
    cohort = _headline_cohort(result)
    name = ttft(cohort, "p90")
    base = next(point for point in reversed(result.points) if point.kind != "scenario")
    title, reference = f"TTFT p90 ({cohort_title(cohort).lower()})", f"{base.name} {value_text(base, name)} ms."
    scenarios = _best_first(result, name)
    if not scenarios:
        return f"{title}: {reference}"
    best = scenarios[0]
    state = "best" if (best.middle(name) or float("inf")) < (base.middle(name) or 0.0) else "nearest"
    state += ", saturated" if best.saturated else ""
    return f"{title}: {best.name} is {state}, {value_text(best, name)} ms ({effect_text(best, name)}); {reference}"


MOST_DRAWN: Final = 8
"""Curves in one figure, the palette's colours."""


SEARCH: Final = "sim search finds the smallest cache or the highest rate that keeps a TTFT limit"
CALIBRATE: Final = "the model's TTFT error here is above the gates' limits: fit new calibrations, then forecast again"


def what_if_page(result: ForecastGrid) -> Page:
    page = panels.grid_page(result, "sim what-if", "docs/what-if.md")
    requests = f"{result.cohorts['all']:,} requests"
    lead = f"{requests}, {result.members} members; brackets are 90 % intervals of members, effects are paired by member"
    survival = [_survival_panel(result, cohort) for cohort in MAIN if cohort in result.cohorts]
    return replace(
        page,
        leads=[lead, *page.leads],
        checks=[_check(gate) for gate in result.gates],
        steps=[SEARCH if result.trusted else CALIBRATE],
        brief=[_brief_table(result)],
        panels=[*survival, *page.panels],
        slots={point.name: slot for slot, point in enumerate(result.points[:MOST_DRAWN])},
        dashed=[point.name for point in result.points if point.kind != "measured"],
    )


def _brief_table(result: ForecastGrid) -> Table:
    name = ttft(_headline_cohort(result), "p90")
    ordered = [*(point for point in result.points if point.kind != "scenario"), *_best_first(result, name)]
    rows = [
        [
            point.name,
            value_text(point, name),
            effect_text(point, name) or NOTHING,
            NOTHING if (rate := point.middle("hit_rate")) is None else number_format.share(rate),
            "saturated" if point.saturated else "",
        ]
        for point in ordered
    ]
    return Table(["", title_of(name), "effect", "hit rate", ""], rows)


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
        caption=f"TTFT survival of {result.cohorts[cohort]:,} requests. Solid: measured. Dashed: forecast; band: 90 %.",
        tables=[panels.point_table(result.points, [ttft(cohort, level) for level in LEVELS], [])],
    )


def survival_curves(plotted: Sequence[ForecastPoint], cohort: str) -> Figure:
    curves = []
    for slot, point in enumerate(plotted[:MOST_DRAWN]):
        curve, measured = point.curves.get(cohort), point.kind == "measured"
        if curve is not None:
            shown = figures.Curve(*map(np.array, (curve.time_ms, curve.survival, curve.low, curve.high)))
            shown = replace(shown, low=np.full(len(curve.low), np.nan)) if measured else shown
            width, dash = (3.0, "solid") if measured else (2.0 if point.kind == "scenario" else 4.5, figures.DASHED)
            curves.append(figures.Survival(name=point.name, curve=shown, slot=slot, width=width, dash=dash))
    return figures.survival_figure(curves, "TTFT (ms)", "requests without a first token")
