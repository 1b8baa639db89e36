"""``sim what-if``: forecast a captured load on another cache, at another rate, under other settings."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from measure import wording
from measure.cohorts import MAIN, cohort_title
from measure.thresholds import TOO_UNCERTAIN, Threshold
from report.grid.points import LEVELS, THROUGHPUT, effect_text, reading_of, span_text, value_text
from report.output import add_page_argument, page_path, put_page
from report.pages.panels import Check, Figure, Page, Panel
from sim.forecast.captured import Captured, plan_as
from sim.forecast.limits import KEYS, judge, parse_limit, ttft
from sim.forecast.results import EffectGate, ForecastGrid, ForecastPoint, Kind
from sim.forecast.scenarios import (
    AS_CAPTURED,
    SCENARIO_FLAGS,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    parse_base,
    scenarios_of,
)
from sim.latency.modelfile import PRICED_SETTINGS, Model
from tracefile import InputError
from tracefile.commandline.ending import verdict_code
from tracefile.commandline.parser import Parser
from tracefile.commandline.progress import counted
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from report.grid import panels
    from report.pages import figures
    from sim.cache import hybrid
    from sim.forecast import points
    from sim.forecast import summary as summing
    from sim.forecast.points import ForecastConfig, PointValues
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    panels, figures = LateModule("report.grid.panels"), LateModule("report.pages.figures")
    hybrid = LateModule("sim.cache.hybrid")
    points, summing = late_modules("sim.forecast", "points summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Scenarios of a capture."""

    scenarios: tuple[Scenario, ...] = ()
    base: Scenario = AS_CAPTURED
    """Forecast that effects are against."""
    gates: tuple[Threshold, ...] = ()


EPILOG = "examples:\n  sim what-if monday.jsonl.zst --latency-model model.json --num-gpu-blocks 20000,40000,80000\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument(
        "--base",
        metavar="NAME=VALUE,…",
        help="forecast that effects are against, such as rate=0.1,num-gpu-blocks=29600 (default: the capture)",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="THRESHOLD",
        help="exit 1 unless every scenario keeps this, 3 if members differ, as hit_rate.difference>=-1%% or "
        "ttft.p95.ratio<=1.05",
    )
    add_scenario_flags(parser)
    add_forecast_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    base = AS_CAPTURED if arguments.base is None else parse_base(arguments.base)
    gates = tuple(parse_limit("--gate", text, KEYS) for text in arguments.gate)
    asked = WhatIf(scenarios=tuple(scenarios_of(arguments, base)), base=base, gates=gates)
    config = points.config_of(arguments)
    html = page_path(arguments, [config.trace, config.model])
    result, finished = forecast_scenarios(config, asked)
    put_page(what_if_page(result), result, as_json=arguments.json, html=html)
    if not finished:
        return 130
    failed = any(gate.sure and not gate.passed for gate in result.gates)
    return verdict_code(failed=failed, uncertain=not all(gate.sure for gate in result.gates))


def forecast_scenarios(config: "ForecastConfig", asked: WhatIf) -> tuple[ForecastGrid, bool]:
    """Return the points, the measured one first, and whether all are there: Ctrl-C keeps finished ones."""
    forecast = points.PointForecast(config, kv_groups=asked.base.settings.get("kv_groups"))
    captured, model = forecast.captured, forecast.model
    measured = summing.measured_point(captured, forecast.cohorts)
    plans = list(_plans(captured, asked, measured))
    made = [] if measured is None else [measured]
    values: list[PointValues] = []
    base: Mapping[str, Any] = {}
    try:
        runs = counted(range(len(plans) * config.members), "forecasts")
        for kind, name, scenario in plans:
            found = forecast((scenario, config.members), threads=None, done=lambda: next(runs, None))
            values.append(found)
            point = points.make_point(
                name,
                scenario.differences,
                found,
                base=base if kind == "scenario" else None,
                kind=kind,
                curves=found.curves,
            )
            if kind == "capture" and measured is not None:
                point = summing.with_errors(point, measured)
            base = base if kind == "scenario" else found.values
            made.append(point)
    except KeyboardInterrupt:
        if not values:
            raise
        print(f"sim what-if: interrupted; {len(values)} of {len(plans)} forecasts are done", file=sys.stderr)
    own = next((point for point in made if point.kind == "capture" and measured is not None), None)
    about = forecast.about(own)
    about["verdicts"] += points.borrowed_sentences(model, values)
    about["notes"] += _notes(captured, model, asked)
    result = ForecastGrid(
        axes=[],
        throughput=THROUGHPUT,
        columns=[
            "hit_rate",
            THROUGHPUT,
            "utilization",
            "queue.p90",
            "itl.p50",
            "itl.p99",
            "e2e.p50",
            "preemptions",
            "unserved",
        ],
        points=made,
        gates=judge(asked.gates, made),
        **about,
    )
    return msgspec.structs.replace(result, headlines=[headline(result)]), len(values) == len(plans)


def _plans(captured: Captured, asked: WhatIf, measured: ForecastPoint | None) -> Iterator[tuple[Kind, str, Scenario]]:
    """Yield the forecasts to make; the capture's is left out where nothing was measured and ``--base`` is another.

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


def _notes(captured: Captured, model: Model, asked: WhatIf) -> Iterator[str]:
    if not asked.scenarios:
        yield f"nothing differs: give {SCENARIO_FLAGS}"
    if captured.paced:
        yield "later turns wait for the outputs before them, then think as long as recorded; a rate multiplies sessions"
    else:
        yield "open loop: every request comes at its recorded offset, divided by the rate"
    unstreamed = sum(record.stream is False for record in captured.records)
    if unstreamed:
        yield f"{unstreamed:,} requests were not streamed: the measured TTFT leaves them out, forecasts do not"
    if captured.engine != model.engine:
        own, fitted = asdict(captured.engine), asdict(model.engine)
        others = [name for name in own if own[name] != fitted[name] and name not in PRICED_SETTINGS]
        texts = [f"{name} {own[name]} (fitted under {fitted[name]})" for name in others]
        yield from [f"settings as the capture tells them: {', '.join(texts)}"] if texts else []
    for scenario in (asked.base, *asked.scenarios):
        engine = plan_as("", captured, scenario).engine
        if engine.kv_groups is not None and engine.enable_prefix_caching and not scenario.cold_prompts:
            yield hybrid.told_losses(captured.path, engine)


def headline(result: ForecastGrid) -> str:
    """Return the best scenario and its effect on TTFT p90 in a sentence, in the cohort that shows a cache."""
    cohort = MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]
    name, scenarios = ttft(cohort, "p90"), [point for point in result.points if point.kind == "scenario"]
    base = next(point for point in reversed(result.points) if point.kind != "scenario")
    title = f"TTFT p90 ({cohort_title(cohort).lower()})"
    if not scenarios:
        return f"{title}, {base.name}: {value_text(base, name)} ms."
    best = min(scenarios, key=lambda point: _middle(point, name))
    effect = effect_text(best, name)
    text = f"{value_text(best, name)} ms{', saturated' if best.saturated else ''}, base {value_text(base, name)} ms"
    text += f" ({effect})" if effect else ""
    if _middle(best, name) < _middle(base, name):
        return f"{title} is best with {best.name}: {text}."
    return f"No scenario lowers {title}. The nearest, {best.name}: {text}."


def _middle(point: ForecastPoint, name: str) -> float:
    middle = point.middle(name)
    return float("inf") if middle is None else middle


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
    reading = wording.factor if gate.key == "ratio" else reading_of(gate.measure)
    found = "not known" if gate.span is None else span_text(gate.span, reading)
    state = "passed" if gate.passed else "FAILED" if gate.sure else f"{TOO_UNCERTAIN}, members differ"
    return Check("gate", state, f"{gate.gate}: {found} with {gate.point}")


def _survival_panel(result: ForecastGrid, cohort: str) -> Panel:
    title = f"TTFT, {cohort_title(cohort).lower()}"
    return Panel(
        chapter=title,
        title=title,
        id="survival-" + "".join(letter if letter.isalnum() else "-" for letter in cohort),
        figure=survival_curves(result.points, cohort),
        caption=f"TTFT survival of {result.cohorts[cohort]:,} requests. Solid: measured; dashed: forecasts, with their "
        "members' band. A cross: the capture would have ended here with requests still waiting.",
        tables=[panels.point_table(result.points, [ttft(cohort, level) for level in LEVELS], [])],
    )


DASHES: Final = ("2px,3px", "10px,3px", "10px,3px,2px,3px")
"""Scenarios in turn, each unlike the base's: equal curves both show."""


def survival_curves(some: Sequence[ForecastPoint], cohort: str) -> Figure:
    """Draw the points' curves: the measured and the base's wide and below, so that none hides an equal curve."""
    drawn = []
    for slot, point in enumerate(some[:MOST_DRAWN]):
        curve, measured, scenario = point.curves.get(cohort), point.kind == "measured", point.kind == "scenario"
        if curve is not None:
            edges = (curve.time_ms, curve.survival, curve.low, curve.high)
            shown = figures.Curve(*map(np.array, edges))
            shown = replace(shown, low=np.full(len(curve.low), np.nan)) if measured else shown
            width = 2.0 if scenario else 3.0 if measured else 4.5
            dash = "solid" if measured else DASHES[slot % 3] if scenario else figures.DASHED
            look = figures.Survival(name=point.name, curve=shown, slot=slot, width=width, dash=dash, stops=curve.stops)
            drawn.append(look)
    return figures.survival_figure(drawn, "TTFT (ms)", "still without a first token")
