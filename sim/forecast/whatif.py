"""``sim what-if``: forecast a captured load on another cache, at another rate, under other settings."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engines.routing.costs import prefill_ms
from measure.thresholds import Threshold
from measure.wording import listed
from report.output import add_page_argument, page_path, write_page
from report.pages.whatif import DemandSaid, Kind, Measure, Row, TiersSaid, WhatIf, describe
from sim.forecast.captured import Captured, Load, plan_as, read_captured
from sim.forecast.effectgates import judge, parse_gate
from sim.forecast.scenarios import (
    AS_CAPTURED,
    SCENARIO_FLAGS,
    Scenario,
    add_forecast_flags,
    add_scenario_flags,
    checked_members,
    parse_base,
    scenarios_of,
)
from sim.latency.modelfile import PRICED_SETTINGS, Model, load_model, model_digest
from sim.latency.terms import DECODES, PREFILL_TOKENS
from sim.latency.verdicts import engine_warning, verdict_sentence
from tracefile import InputError
from tracefile.commandline.ending import verdict_code
from tracefile.commandline.printing import print_result
from tracefile.commandline.progress import counted
from tracefile.records.arrays import FloatArray
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from measure import resampling
    from report.pages import forecastpages
    from sim.cache import hybrid
    from sim.engine import dispatch as dispatching
    from sim.engine.tiers import TierTraffic
    from sim.forecast import ensemble, saturation
    from sim.forecast import fleets as running
    from sim.forecast import summary as summing
    from sim.forecast.saturation import Demand
    from sim.forecast.summary import ForecastSummary
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    resampling = LateModule("measure.resampling")
    forecastpages = LateModule("report.pages.forecastpages")
    hybrid = LateModule("sim.cache.hybrid")
    dispatching = LateModule("sim.engine.dispatch")
    ensemble, running, saturation, summing = late_modules("sim.forecast", "ensemble fleets saturation summary")


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
    base: Scenario = AS_CAPTURED
    """Forecast that effects are against."""
    gates: tuple[Threshold, ...] = ()


EPILOG = "examples:\n  sim what-if monday.jsonl.zst --latency-model model.json --num-gpu-blocks 20000,40000,80000\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    parser.add_argument(
        "--base",
        metavar="NAME=VALUE,…",
        help="forecast that effects are against, such as rate=0.1,num-gpu-blocks=29600 (default: the capture)",
    )
    add_scenario_flags(parser)
    add_forecast_flags(parser)
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="THRESHOLD",
        help="exit 1 unless every scenario keeps this, 3 if members differ, as hit_rate.difference>=-1%% or "
        "ttft.p95.ratio<=1.05",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_page_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    base = AS_CAPTURED if arguments.base is None else parse_base(arguments.base)
    config = WhatIfConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        scenarios=tuple(scenarios_of(arguments, base)),
        base=base,
        gates=tuple(parse_gate(text) for text in arguments.gate),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        seed=arguments.seed,
        json=arguments.json,
    )
    html = page_path(arguments, [config.trace, config.model])
    result, finished = forecast_scenarios(config)
    print_result(result, [describe(result)], as_json=config.json)
    if html is not None:
        write_page(html, forecastpages.render_what_if(result))
    if not finished:
        return 130
    failed = any(gate.sure and not gate.passed for gate in result.gates)
    return verdict_code(failed=failed, uncertain=not all(gate.sure for gate in result.gates))


def forecast_scenarios(config: WhatIfConfig) -> tuple[WhatIf, bool]:
    """Return the rows, the measured one first, and whether all are there: Ctrl-C keeps finished rows."""
    model = load_model(config.model)
    groups = config.base.settings.get("kv_groups")
    captured = read_captured(config.trace, model, paced=config.paced, kv_groups=groups)
    cohorts = summing.cohorts_of(captured.records)
    measured = summing.measured_row(captured, cohorts)
    loads = [(asked, _planned(captured, asked)) for asked in _asked(config, measured)]
    drawn = ensemble.members(model, config.members, config.seed)
    rows = [] if measured is None else [measured]
    summaries: list[ForecastSummary] = []
    base = 0
    try:
        runs = counted(range(len(loads) * config.members), "forecasts")
        for asked, load in loads:
            found = running.forecast_load(load, drawn, seed=config.seed, done=lambda: next(runs, None))
            summaries.append(summing.summarize(load, found, model, cohorts, paced=captured.paced))
            if asked.kind != "scenario":
                base = len(summaries) - 1
            row = _row(asked, summaries, base, measured, model)
            rows.append(msgspec.structs.replace(row, tiers=tiers_said(load, summaries[-1].run.traffic, drawn)))
    except KeyboardInterrupt:
        if not summaries:
            raise
        print(f"sim what-if: interrupted; {len(summaries)} of {len(loads)} forecasts are done", file=sys.stderr)
    result = WhatIf(
        trace=config.trace.name,
        trace_digest=captured.digest,
        model_digest=model_digest(model),
        members=config.members,
        seed=config.seed,
        confidence=resampling.CONFIDENCE,
        paced=captured.paced,
        requests=len(captured.records),
        cohorts={name: len(places) for name, places in cohorts.items()},
        engine=asdict(summaries[base].load.engine),
        verdicts=[
            *engine_warning(model, captured.meta, captured.engine),
            "; ".join([verdict_sentence(config.model, model, captured.digest, captured.meta), *_own_errors(rows)]),
            *_borrowed(model, summaries),
        ],
        unchanged=_unchanged(rows, summaries, base),
        notes=[*_notes(captured, model, config), *_group_notes(captured, [load for _, load in loads])],
        rows=rows,
        gates=judge(config.gates, rows),
    )
    return result, len(summaries) == len(loads)


@dataclass(frozen=True, slots=True)
class _Asked:
    kind: Kind
    name: str
    scenario: Scenario


def _asked(config: WhatIfConfig, measured: Row | None) -> Iterator[_Asked]:
    """Yield the forecasts to make; the capture's is left out where nothing was measured and ``--base`` is another."""
    other = config.base.name_beside(AS_CAPTURED)
    if measured is not None or not other:
        yield _Asked("capture", "forecast of the capture", AS_CAPTURED)
    if other:
        yield _Asked("base", f"base: {other}", config.base)
    for scenario in config.scenarios:
        yield _Asked("scenario", scenario.name_beside(config.base), scenario)


def _planned(captured: Captured, asked: _Asked) -> Load:
    load = plan_as(asked.name, captured, asked.scenario)
    if not load.serves:
        blocks = load.engine.num_gpu_blocks
        raise InputError(f"{asked.name}: {blocks} blocks hold no request; expected more --num-gpu-blocks")
    return load


def _own_errors(rows: Sequence[Row]) -> Iterator[str]:
    capture = next((row for row in rows if row.kind == "capture"), None)
    if capture is not None and capture.demand is not None:
        found = summing.trust_in(capture.measures, capture.errors, saturated=capture.demand.saturated)
        yield from [] if found is None else [found.sentence]


def _borrowed(model: Model, summaries: "Sequence[ForecastSummary]") -> Iterator[str]:
    """Yield a sentence about borrowed parameters that matter in some forecast; none: none do."""
    names = dict.fromkeys(
        said for one in reversed(summaries) for said in saturation.borrowed_parameters(model, one.run)
    )
    if names:
        yield f"borrowed from {model.diagnostics['borrowed']['from']}: {listed(list(names))}"


def _row(asked: _Asked, summaries: "Sequence[ForecastSummary]", base: int, measured: Row | None, model: Model) -> Row:
    first, one = summaries[0], summaries[-1]
    against = summaries[base] if asked.kind == "scenario" else None
    measures = {name: _measure(name, one, against) for name in one.values}
    return Row(
        name=asked.name,
        kind=asked.kind,
        settings=asked.scenario.differences,
        rate=asked.scenario.rate,
        cold_prompts=asked.scenario.cold_prompts,
        num_gpu_blocks=one.load.engine.num_gpu_blocks,
        measures=measures,
        errors=summing.errors_of(measures, measured) if measured is not None and asked.kind == "capture" else {},
        demand=_said(one.demand),
        routing=one.routing,
        warnings=list(
            [*saturation.open_parameters(model, one.run), *saturation.beyond_fit(one.run, model)]
            if one is first
            else saturation.extrapolations(model, first.run, one.run, first.load.engine, one.load.engine)
        ),
        assumptions=list(one.load.deployment.assumptions()),
        curves=one.curves,
    )


def _unchanged(rows: Sequence[Row], summaries: "Sequence[ForecastSummary]", base: int) -> str | None:
    """Say why no scenario differs from the base in any member; None: some do, or there is none."""
    scenarios = [row for row in rows if row.kind == "scenario"]
    if not scenarios or any(_differs(measure) for row in scenarios for measure in row.measures.values()):
        return None
    load, counts = summaries[base].load, summaries[base].run.counts
    if not len(counts):
        return "nothing changes: no request of this load runs in an engine: it failed, or its output_tokens are unknown"
    most = counts.max(axis=0)
    blocks, usable = load.most_blocks, min(one.load.engine.usable_blocks for one in summaries[base:])
    pool = f"touches at most {blocks:,} blocks of {load.engine.block_size} tokens"
    pool += f" (the engine has {usable:,})" if blocks <= usable else ", and no block that is evicted is asked for again"
    return (
        f"nothing changes: this load {pool}, decodes at most {most[DECODES]:,.0f} requests in a step and computes at "
        f"most {most[PREFILL_TOKENS]:,.0f} prompt tokens in one"
    )


def _differs(measure: Measure) -> bool:
    span = measure.difference
    if span is None or span.middle is None:
        return measure.value.middle is not None
    return any((span.low, span.middle, span.high))


def _measure(name: str, one: "ForecastSummary", base: "ForecastSummary | None") -> Measure:
    values, beyond = one.values[name], one.beyond.get(name)
    if base is None:
        return Measure(value=summing.span_of(values, beyond))
    before = base.values[name]
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, ratio = values - before, np.where(before > 0.0, values / before, np.nan)
    middle = ensemble.interval(before).middle
    known = beyond is not None and np.isfinite(middle)
    return Measure(
        value=summing.span_of(values, beyond),
        difference=summing.span_of(difference, (beyond or 0.0) - middle if known else None),
        ratio=summing.span_of(ratio, (beyond or 0.0) / middle if known and middle > 0.0 else None),
    )


def _said(demand: "Demand") -> DemandSaid:
    numbers = ("utilization", "prefill", "decode", "frontend", "capacity", "in_flight_growth_per_s")
    said = {name: summing.finite(getattr(demand, name)) for name in numbers}
    return DemandSaid(in_flight_at_end=demand.in_flight_at_end, saturated=demand.is_saturated, **said)


def _group_notes(captured: Captured, loads: Sequence[Load]) -> Iterator[str]:
    engines = dict.fromkeys(one.engine for one in loads if not (one.scenario.cold_prompts or captured.cold))
    for engine in engines:
        if engine.kv_groups is not None and engine.enable_prefix_caching:
            yield hybrid.told_losses(captured.path, engine)


def _notes(captured: Captured, model: Model, config: WhatIfConfig) -> Iterator[str]:
    rates = any(scenario.rate != 1.0 for scenario in (config.base, *config.scenarios))
    if not config.scenarios:
        yield f"nothing differs: give {SCENARIO_FLAGS}"
    if captured.paced:
        yield "later turns wait for the outputs before them, then think as long as recorded" + (
            "; a rate multiplies the sessions that begin in a second" if rates else ""
        )
    else:
        yield (
            "open loop: every request comes at its recorded offset"
            + (", divided by the rate" if rates else "")
            + (": think times between turns shrink with it" if rates and captured.has_turns else "")
        )
    yield from filter(None, [captured.part_hashed])
    unstreamed = sum(record.stream is False for record in captured.records)
    if unstreamed:
        yield f"{unstreamed:,} requests were not streamed: the measured TTFT leaves them out, forecasts do not"
    yield from ensemble.no_draws(model)
    if any(record.status not in ("ok", "error") for record in captured.records):
        yield "clients that aborted abort after the same wait here"
    if captured.engine != model.engine:
        own, fitted = asdict(captured.engine), asdict(model.engine)
        others = [name for name in own if own[name] != fitted[name] and name not in PRICED_SETTINGS]
        said = [f"{name} {own[name]} (fitted under {fitted[name]})" for name in others]
        yield from [f"settings as the capture tells them: {', '.join(said)}"] if said else []


def tiers_said(load: Load, traffic: "TierTraffic | None", members: Sequence[Model]) -> TiersSaid | None:
    """Return what a load's run moved to and from the host's memory; None: it has none."""
    if traffic is None or load.deployment.tiers is None:
        return None
    block_gb = load.deployment.kv_bytes_per_token * load.engine.block_size / 1e9
    mean = traffic.loaded_tokens / traffic.loads if traffic.loads else 0.0
    return TiersSaid(
        loads=traffic.loads,
        loaded_tokens=traffic.loaded_tokens,
        read_gb=round(traffic.loaded_tokens * load.deployment.kv_bytes_per_token / 1e9, 4),
        written_gb=round(traffic.stored_blocks * block_gb, 4),
        kept_blocks=traffic.host_blocks,
        evicted_blocks=traffic.host_evicted,
        mean_load_tokens=round(mean, 1),
        break_even_gb_per_s=summing.span_of(break_even_gb_per_s(load, members, mean), None) if mean else None,
    )


def break_even_gb_per_s(load: Load, members: Sequence[Model], tokens: float) -> FloatArray:
    """Return each member's bandwidth at which a transfer of ``tokens`` takes as long as computing them from a prompt's
    start, without the steps' constants; infinite: its latency alone takes longer."""
    deployment = load.deployment
    computing_ms = np.array([prefill_ms(dispatching.costs_of(one, load.engine), tokens, 0.0) for one in members])
    left_ms = np.maximum(computing_ms - deployment.host_latency_ms, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(tokens * deployment.kv_bytes_per_token / 1e6 / left_ms)
