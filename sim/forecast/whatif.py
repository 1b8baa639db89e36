"""``sim what-if``: forecast a captured load on another cache, at another rate, under other settings."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from report.output import print_json, write_page
from report.pages.whatif import DemandSaid, Measure, Row, WhatIf, describe
from sim.forecast.ensemble import CONFIDENCE, forecast, interval, members
from sim.forecast.saturation import Demand, extrapolations, open_parameters
from sim.forecast.scenarios import (
    Captured,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    checked_members,
    plan,
    read_captured,
    scenarios_of,
)
from sim.forecast.summary import ForecastSummary, cohorts_of, finite, span_of, summarize
from sim.kernels import loop
from sim.kernels.compiling import say_if_not_compiled
from sim.latency.modelfile import Model, load_model, model_digest
from tracefile.commandline.progress import counted


@dataclass(frozen=True, slots=True)
class WhatIfConfig:
    """Settings of ``sim what-if``."""

    trace: Path
    model: Path
    scenarios: tuple[Scenario, ...]
    paced: bool | None = None
    """None: if the trace knows its sessions."""
    members: int = 32
    seed: int = 0
    json: bool = False
    page: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim fit")
    add_scenario_flags(parser)
    add_forecast_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")


def run(arguments: argparse.Namespace) -> int:
    config = WhatIfConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        scenarios=tuple(scenarios_of(arguments)),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        seed=arguments.seed,
        json=arguments.json,
        page=arguments.html,
    )
    result, finished = forecast_scenarios(config)
    if config.json:
        print_json(result)
    print(describe(result), file=sys.stderr if config.json else None)
    if config.page is not None:
        # The page's libraries take half a second to import.
        from report.pages.forecastpages import render_what_if  # noqa: PLC0415

        write_page(config.page, render_what_if(result))
    return 0 if finished else 130


def forecast_scenarios(config: WhatIfConfig) -> tuple[WhatIf, bool]:
    """Return the rows, the capture's first, and whether all are there: Ctrl-C keeps finished rows."""
    model = load_model(config.model)
    captured = read_captured(config.trace, model, paced=config.paced)
    loads = [plan(captured, scenario) for scenario in (Scenario({}), *config.scenarios)]
    say_if_not_compiled(loop.run)
    drawn = members(model, config.members, config.seed)
    cohorts = cohorts_of(captured.records)
    rows: list[Row] = []
    finished = True
    try:
        base: ForecastSummary | None = None
        runs = counted(range(len(loads) * config.members), "forecasts")
        for load in loads:
            found = forecast(load.arrivals, load.engine, drawn, seed=config.seed, done=lambda: next(runs, None))
            one = summarize(load, found, model, cohorts, paced=captured.paced)
            base = base or one
            rows.append(_row(one, base, model))
    except KeyboardInterrupt:
        finished = False
        if not rows:
            raise
        print(f"sim what-if: interrupted; {len(rows)} of {len(loads)} rows are done", file=sys.stderr)
    result = WhatIf(
        trace=config.trace.name,
        trace_digest=captured.digest,
        model_digest=model_digest(model),
        members=config.members,
        seed=config.seed,
        confidence=CONFIDENCE,
        paced=captured.paced,
        requests=len(captured.records),
        cohorts={name: len(places) for name, places in cohorts.items()},
        notes=list(_notes(captured, model, config.scenarios)),
        rows=rows,
    )
    return result, finished


def _row(one: ForecastSummary, base: ForecastSummary, model: Model) -> Row:
    scenario, is_base = one.load.scenario, one is base
    return Row(
        name=scenario.name,
        settings=dict(scenario.settings),
        rate=scenario.rate,
        cold_prompts=scenario.cold_prompts,
        num_gpu_blocks=one.load.engine.num_gpu_blocks,
        measures={name: _measure(name, one, None if is_base else base) for name in one.values},
        demand=_said(one.demand),
        warnings=list(
            open_parameters(model, one.run)
            if is_base
            else extrapolations(model, base.run, one.run, base.load.engine, one.load.engine)
        ),
        curves=one.curves,
    )


def _measure(name: str, one: ForecastSummary, base: ForecastSummary | None) -> Measure:
    values, beyond = one.values[name], one.beyond.get(name)
    if base is None:
        return Measure(value=span_of(values, beyond))
    before = base.values[name]
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, ratio = values - before, np.where(before > 0.0, values / before, np.nan)
    middle = interval(before).middle
    known = beyond is not None and np.isfinite(middle)
    return Measure(
        value=span_of(values, beyond),
        difference=span_of(difference, (beyond or 0.0) - middle if known else None),
        ratio=span_of(ratio, (beyond or 0.0) / middle if known and middle > 0.0 else None),
    )


def _said(demand: Demand) -> DemandSaid:
    numbers = ("utilization", "prefill", "decode", "frontend", "capacity", "in_flight_growth_per_s")
    said = {name: finite(getattr(demand, name)) for name in numbers}
    return DemandSaid(in_flight_at_end=demand.in_flight_at_end, saturated=demand.is_saturated, **said)


def _notes(captured: Captured, model: Model, scenarios: Sequence[Scenario]) -> Iterator[str]:
    rates = any(scenario.rate != 1.0 for scenario in scenarios)
    if captured.paced:
        yield "later turns wait for the answers before them, then think as long as recorded" + (
            "; a rate multiplies the sessions that begin in a second" if rates else ""
        )
    else:
        yield "open loop: every request comes at its recorded offset" + (
            ", divided by the rate: think times between turns shrink with it" if rates else ""
        )
    if not model.draws:
        yield "the model has no draws of its parameters (fit it again): intervals hold noise and drift only"
    if any(record.status not in ("ok", "error") for record in captured.records):
        yield "clients that aborted abort after the same wait here"
    if captured.engine != model.engine:
        own, fitted = asdict(captured.engine), asdict(model.engine)
        said = [f"{name} {own[name]} (fitted under {fitted[name]})" for name in own if own[name] != fitted[name]]
        yield f"settings as the capture tells them: {', '.join(said)}"
