"""``sim what-if``: forecast a captured load on another cache, at another rate, under other settings."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure.thresholds import Threshold
from measure.wording import listed
from report.output import add_page_argument, page_path, put_page
from sim.forecast.captured import Captured, Load, plan_as, read_captured
from sim.forecast.limits import KEYS, judge, parse_limit
from sim.forecast.results import DemandSummary, Kind, Row, TierSummary, WhatIf
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
from tracefile.commandline.parser import Parser
from tracefile.commandline.progress import counted
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    from measure import resampling
    from sim.cache import hybrid
    from sim.engine.tiers import TierTraffic
    from sim.forecast import ensemble, saturation, whatifpage
    from sim.forecast import fleets as running
    from sim.forecast import summary as summing
    from sim.forecast.saturation import Demand
    from sim.forecast.summary import ForecastSummary
else:  # numpy and a page's libraries, which the flags need not
    resampling = LateModule("measure.resampling")
    hybrid = LateModule("sim.cache.hybrid")
    ensemble, saturation, whatifpage = late_modules("sim.forecast", "ensemble saturation whatifpage")
    running, summing = late_modules("sim.forecast", "fleets summary")


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
    base: Scenario = AS_CAPTURED
    """Forecast that effects are against."""
    gates: tuple[Threshold, ...] = ()


EPILOG = "examples:\n  sim what-if monday.jsonl.zst --latency-model model.json --num-gpu-blocks 20000,40000,80000\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim fit")
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
    config = WhatIfConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        scenarios=tuple(scenarios_of(arguments, base)),
        base=base,
        gates=tuple(parse_limit("--gate", text, KEYS) for text in arguments.gate),
        paced=arguments.replay_sessions,
        members=checked_members(arguments.members),
        seed=arguments.seed,
    )
    html = page_path(arguments, [config.trace, config.model])
    result, finished = forecast_scenarios(config)
    put_page(whatifpage.what_if_page(result), result, as_json=arguments.json, html=html)
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
            rows.append(_row(asked, summaries, base, measured, model))
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
        cohorts={name: len(indexes) for name, indexes in cohorts.items()},
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
        name for one in reversed(summaries) for name in saturation.borrowed_parameters(model, one.run)
    )
    if names:
        yield f"borrowed from {model.diagnostics['borrowed']['from']}: {listed(list(names))}"


def _row(asked: _Asked, summaries: "Sequence[ForecastSummary]", base: int, measured: Row | None, model: Model) -> Row:
    first, one = summaries[0], summaries[-1]
    measures = summing.measures_beside(one, summaries[base] if asked.kind == "scenario" else None)
    own_warnings = [*saturation.open_parameters(model, one.run), *saturation.beyond_fit(one.run, model)]
    beside = saturation.extrapolations(model, first.run, one.run, first.load.engine, one.load.engine)
    return Row(
        name=asked.name,
        kind=asked.kind,
        settings={**asked.scenario.differences},
        rate=asked.scenario.rate,
        cold_prompts=asked.scenario.cold_prompts,
        num_gpu_blocks=one.load.engine.num_gpu_blocks,
        measures=measures,
        errors=summing.errors_of(measures, measured) if measured is not None and asked.kind == "capture" else {},
        demand=_demand(one.demand),
        routing=one.routing,
        tiers=_tiers(one.load, one.run.traffic),
        warnings=own_warnings if one is first else list(beside),
        assumptions=list(one.load.deployment.assumptions()),
        curves=one.curves,
    )


def _unchanged(rows: Sequence[Row], summaries: "Sequence[ForecastSummary]", base: int) -> str | None:
    """Return why no scenario differs from the base in any member; None: some do, or there is none."""
    scenarios = [row for row in rows if row.kind == "scenario"]
    spans = [(measure.value, measure.difference) for row in scenarios for measure in row.measures.values()]
    if not scenarios or any(
        value.middle is not None if span is None or span.middle is None else any((span.low, span.middle, span.high))
        for value, span in spans
    ):
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


def _demand(demand: "Demand") -> DemandSummary:
    names = ("utilization", "prefill", "decode", "frontend", "capacity", "in_flight_growth_per_s")
    numbers = {name: summing.finite(getattr(demand, name)) for name in names}
    return DemandSummary(in_flight_at_end=demand.in_flight_at_end, saturated=demand.is_saturated, **numbers)


def _tiers(load: Load, traffic: "TierTraffic | None") -> TierSummary | None:
    """Return the load's traffic to and from the host's memory; None: it has none."""
    if traffic is None or load.deployment.tiers is None:
        return None
    token_gb = load.deployment.kv_bytes_per_token / 1e9
    return TierSummary(
        loads=traffic.loads,
        loaded_tokens=traffic.loaded_tokens,
        read_gb=round(traffic.loaded_tokens * token_gb, 4),
        written_gb=round(traffic.stored_blocks * token_gb * load.engine.block_size, 4),
        kept_blocks=traffic.host_blocks,
        evicted_blocks=traffic.host_evicted,
    )


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
        texts = [f"{name} {own[name]} (fitted under {fitted[name]})" for name in others]
        yield from [f"settings as the capture tells them: {', '.join(texts)}"] if texts else []
