"""``sim run``: predict latencies and cached tokens of a trace on an engine; the result is a trace."""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure import survival
from measure.number_format import NOTHING, coverage_text
from measure.table import table_lines
from sim.engine import results as outcomes
from sim.engine import simulation as simulations
from sim.engine import tiers
from sim.engine.deployment import Deployment, deployment_of
from sim.engine.fleet_events import settings_of
from sim.engine.fleetplan import (
    CAPTURED,
    LONE_ROUTE,
    FleetPlan,
    fleet_plan,
)
from sim.engine.fleets import FleetEngine, FleetLoad, engines_of, routed_requests, run_fleet
from sim.engine.loop import Engine
from sim.engine.predicted_records import BY_FLEET, TOO_LONG
from sim.engine.results import EngineResults, Results
from sim.engine.tiers import TierTraffic
from sim.latency.fittraces import refuse_fitted
from sim.latency.modelfile import Model, engine_with, load_model
from sim.latency.verdicts import engine_warning, verdict_sentence
from sim.vllm.config import EngineConfig, engine_overrides
from sim.vllm.request import NOT_ADMITTED
from sim.vllm.settings import refuse_other_attention
from sim.workload import arrivalorder
from sim.workload.arrivals import Arrivals, plan_arrivals
from tracefile.files.digest import trace_digest
from tracefile.files.reading import TraceReader, open_trace
from tracefile.files.writing import TraceWriter, check_new, new_writer
from tracefile.records import batches
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

MOST_EVENTS_SHOWN = 12
_LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class CohortSummary:
    """TTFT quantiles of a cohort, in ms; aborts before it are censored. None: beyond the last first token."""

    name: str
    requests: int
    """Requests that waited for a first token."""
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Summary of a fleet's run."""

    route: str
    engines: int
    events: list[tuple[float, str, str]]
    """Time in s from the first arrival, event, engine."""
    not_served: dict[str, int]
    """Requests that failed in the fleet, by error."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a predicted trace: prefix hits, preemptions, scheduler steps, TTFT."""

    requests: int
    not_ok: int
    unservable: int
    """Requests too long for this engine; included in ``not_ok``."""
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    arrivals_ms: float
    drain_ms: float
    """From the last arrival to the last end."""
    cohorts: list[CohortSummary]
    fleet: FleetSummary | None = None
    """None: one engine."""
    tiers: TierTraffic | None = None
    """None: no KV cache offloading."""
    assumptions: tuple[str, ...] = ()
    """Assumptions of KV cache offloading, which no capture confirms."""

    @property
    def is_overrun(self) -> bool:
        """True if the engine drains for longer than the arrivals lasted, and for more than a minute."""
        return self.drain_ms > max(self.arrivals_ms, 60_000.0)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarise(records: Iterable[Record], preemptions: int, steps: int) -> Summary:
    """Summarise a predicted trace in one pass, without keeping its records: tokens, prefix hits, TTFT."""
    columns = np.fromiter(chain.from_iterable(map(_numbers, records)), np.float64).reshape(-1, 9).T
    arrival_ms, e2e_ms, ttft_ms, ttft_end, turn, prompt_tokens, cached_tokens, not_ok, too_long = columns
    counted = cached_tokens != NOT_ADMITTED
    turns = {"all": turn >= 0, "turn 1": turn == 1, "turns 2+": turn > 1}
    waited = {name: rows & ~np.isnan(ttft_ms) for name, rows in turns.items()}
    last_ms = arrival_ms.max(initial=-np.inf)
    return Summary(
        requests=len(turn),
        not_ok=int(not_ok.sum()),
        unservable=int(too_long.sum()),
        prompt_tokens=int(prompt_tokens[counted].sum()),
        cached_tokens=int(cached_tokens[counted].sum()),
        preemptions=preemptions,
        steps=steps,
        arrivals_ms=float(last_ms - arrival_ms.min()) if len(turn) else 0.0,
        drain_ms=float((arrival_ms + e2e_ms).max() - last_ms) if len(turn) else 0.0,
        cohorts=[_cohort(name, ttft_ms[rows], ttft_end[rows]) for name, rows in waited.items() if rows.any()],
    )


def _numbers(record: Record) -> tuple[float, ...]:
    return (
        record.arrival_ms or 0.0,
        record.e2e_ms or 0.0,
        *_first_token_end(record),
        record.turn or 0,
        record.prompt_tokens or 0,
        NOT_ADMITTED if record.cached_tokens is None else record.cached_tokens,
        record.status != "ok",
        record.error == TOO_LONG,
    )


def _first_token_end(record: Record) -> tuple[float, int]:
    """Return the TTFT, or the time to its failure or censoring, and the kind of end; NaN: not streamed."""
    if record.ttft_ms is not None:
        return record.ttft_ms, survival.EVENT
    end = survival.END_OF_STATUS[record.status]
    return math.nan if record.e2e_ms is None or end == survival.EVENT else record.e2e_ms, end


def _cohort(name: str, ttft_ms: FloatArray, ttft_end: FloatArray) -> CohortSummary:
    sample = survival.latency_sample(ttft_ms, ttft_end.astype(np.int8), np.arange(len(ttft_ms)))
    levels = survival.quantiles(sample, survival.incidence(sample), np.array(_LEVELS)).tolist()
    p50, p90, p99 = (value if math.isfinite(value) else None for value in levels)
    return CohortSummary(name, len(ttft_ms), p50, p90, p99)


def run(arguments: argparse.Namespace) -> int:
    """Predict a trace, write it, print the summary. Exit code 1: the scheduler could serve no request."""
    with batches.without_collector():
        summary = predict_trace(arguments)
    fields = {**asdict(summary), "hit_rate": summary.hit_rate}
    fields = {name: value for name, value in fields.items() if value or name not in ("fleet", "tiers", "assumptions")}
    print(json.dumps(fields) if arguments.json else _as_text(summary, arguments.output))
    return 1 if summary.unservable and not summary.steps else 0


def predict_trace(arguments: argparse.Namespace) -> Summary:
    trace, seed, deployment = arguments.trace, None if arguments.no_noise else arguments.seed, deployment_of(arguments)
    models, digest = [load_model(path) for path in arguments.latency_model], trace_digest(trace)
    for model in models:
        refuse_fitted(model.fitted_on, trace, digest)
    model, engine = models[0], _deployed(models[0], arguments, deployment)
    with open_trace(trace) as reader:
        if engine.kv_groups is None:
            refuse_other_attention(reader.meta, trace)
        header = outcomes.predicted_meta(
            reader.meta,
            model,
            engine,
            digest,
            replay_sessions=arguments.replay_sessions,
            cold_prompts=arguments.cold_prompts,
            seed=seed,
        )
        verdict = verdict_sentence(arguments.latency_model[0], model, digest, reader.meta)
        for line in (*engine_warning(model, reader.meta), verdict):
            print(f"sim run: {line}", file=sys.stderr)
        arrivals = read_arrivals(reader, engine, arguments)
    deployment.require_host_capacity(arrivals, engine.block_size)
    inputs = [trace, *arguments.latency_model]
    check_new(arguments.output, inputs=inputs, overwrite=arguments.overwrite)
    if _is_fleet(arguments, models):
        finished, fleet = _run_fleet(arguments, arrivals, models, deployment, seed)
    else:
        finished, fleet = run_engine(arrivals, engine, model, seed, deployment.tiers), {}
    extra = {"validation": verdict, **deployment.meta(), **fleet}
    header = msgspec.structs.replace(header, extra={**header.extra, **extra})
    keep_hashes = not arguments.cold_prompts
    records = outcomes.finished_records(finished.results, engine.block_size, keep_hashes=keep_hashes)
    with new_writer(arguments.output, header, inputs=inputs, overwrite=arguments.overwrite) as writer:
        summary = summarise(written(records, writer), finished.preemptions, finished.steps)
    return replace(
        summary,
        fleet=finished.fleet,
        tiers=finished.traffic if deployment.tiers else None,
        assumptions=tuple(deployment.assumptions()),
    )


def written(records: Iterable[Record], writer: TraceWriter) -> Iterator[Record]:
    """Write the records and yield them."""
    for record in records:
        writer.write(record)
        yield record


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Finished run of an engine or of a fleet."""

    results: Results
    engines: list[Engine]
    """Engines, each from a cold start to the next."""
    traffic: TierTraffic
    fleet: FleetSummary | None = None

    @property
    def preemptions(self) -> int:
        return sum(int(engine.preemptions) for engine in self.engines)

    @property
    def steps(self) -> int:
        return sum(int(engine.engine_steps) for engine in self.engines)


def run_engine(
    arrivals: Arrivals, config: EngineConfig, model: Model, seed: int | None, deployment: Deployment | None = None
) -> FinishedRun:
    """Run a workload on one engine until all requests have ended."""
    run = simulations.simulate(arrivals, config, model, seed, deployment=deployment)
    results = EngineResults(run.requests, np.arange(len(arrivals)), run.engine.delivered_ms)
    return FinishedRun(Results(arrivals, [results]), [run.engine], tiers.traffic_of([run.engine]))


def _deployed(model: Model, arguments: argparse.Namespace, deployment: Deployment) -> EngineConfig:
    """Return the model's scheduler settings with the overrides of the flags."""
    engine = engine_with(model.engine, engine_overrides(arguments))
    deployment.check(engine)
    return engine


def _is_fleet(arguments: argparse.Namespace, models: Sequence[Model]) -> bool:
    """Return whether the flags set several engines or a router. Raises InputError for flags that need a fleet."""
    is_fleet = bool(arguments.route is not None or arguments.event or arguments.replicas not in (None, "1"))
    routed = arguments.route not in (None, CAPTURED)
    if routed and arguments.replicas is None and not arguments.event:
        raise InputError(f"--route: {LONE_ROUTE}")
    if not is_fleet and len(models) > 1:
        raise InputError(f"--latency-model: {len(models)} models for one engine; expected --replicas {len(models)}")
    return is_fleet


def _run_fleet(
    arguments: argparse.Namespace, arrivals: Arrivals, models: Sequence[Model], deployment: Deployment, seed: int | None
) -> tuple[FinishedRun, dict[str, Any]]:
    """Run ``arrivals`` on the fleet that the flags set; return the run and the fleet's settings for the header."""
    configs = {id(model): _deployed(model, arguments, deployment) for model in models}
    plan = fleet_plan(arguments.replicas, arguments.route, arguments.event, lambda: arrivals.column("upstream"))
    assert plan is not None
    engines = engines_of(plan, models, lambda model: configs[id(model)], deployment)
    routed = routed_requests(arrivals, configs[id(models[0])].block_size)
    load = run_fleet(arrivals, routed, engines, plan, seed)
    lives = [life.engine for life in load.fleet.lives]
    meta = {
        "engines": list(plan.names),
        "route": plan.route,
        "events": [settings_of(event) for event in plan.events],
    }
    results = load.results()
    return FinishedRun(results, lives, load.traffic, _fleet_summary(plan, engines, load)), {"fleet": meta}


def _fleet_summary(plan: FleetPlan, engines: Sequence[FleetEngine], load: FleetLoad) -> FleetSummary:
    first_ms = float(load.arrivals.arrival_ms.min(initial=np.inf))
    failed = Counter(request.outcome for request in load.requests)
    return FleetSummary(
        route=plan.route,
        engines=len(engines),
        events=[((at_ms - first_ms) / 1e3, what, engines[engine].name) for at_ms, what, engine in load.dispatch.log],
        not_served={error: failed[outcome] for outcome, error in BY_FLEET.items() if failed[outcome]},
    )


def read_arrivals(reader: TraceReader, engine: EngineConfig, arguments: argparse.Namespace) -> Arrivals:
    """Read the requests in order of arrival; with ``--replay-sessions`` a later turn waits for its parent."""
    trace, cold_prompts, replay_sessions = arguments.trace, arguments.cold_prompts, arguments.replay_sessions
    records = reader.requests()
    if not len(records):
        raise InputError(f"{trace}: no records; expected at least one request")
    if replay_sessions:
        records = arrivalorder.linked_records(reader.meta, list(records), trace)
    arrivals = plan_arrivals(
        reader.meta, records, engine.block_size, path=trace, cold_prompts=cold_prompts, replay_sessions=replay_sessions
    )
    hashed = len(arrivals) if cold_prompts else arrivals.batch.count("block_hashes")
    coverage = coverage_text(hashed, len(arrivals), "block hashes")
    for warning in [*reader.warnings, *([f"hits are {coverage}"] if coverage else [])]:
        print(f"warning: {warning}", file=sys.stderr)
    return arrivalorder.by_session(arrivals) if replay_sessions else arrivalorder.by_arrival(arrivals)


def _as_text(summary: Summary, output: Path) -> str:
    too_long = f" ({summary.unservable} too long for this engine)" if summary.unservable else ""
    lines = [
        f"{output}: {summary.requests} requests, {summary.not_ok} not ok{too_long}; {summary.steps} steps, "
        f"{summary.preemptions} preemptions; {summary.hit_rate:.1%} of prompt tokens cached",
    ]
    rows = [
        [cohort.name, str(cohort.requests), *map(_shown_ms, (cohort.p50_ms, cohort.p90_ms, cohort.p99_ms))]
        for cohort in summary.cohorts
    ]
    lines += table_lines(["TTFT ms", "n", "p50", "p90", "p99"], rows, "<", gap="    ")
    if summary.fleet is not None:
        lines += fleet_lines(summary.fleet)
    if summary.tiers is not None:
        lines.append(tiers.traffic_sentence(summary.tiers))
    lines += [f"assumed: {assumption}" for assumption in summary.assumptions]
    if summary.is_overrun:
        arrivals_s, drain_s = summary.arrivals_ms / 1e3, summary.drain_ms / 1e3
        lines.append(
            f"overrun: the engine drained for {drain_s:,.0f} s after {arrivals_s:,.0f} s of arrivals; requests arrive "
            "faster than it serves them, so TTFT grows with the length of the trace"
        )
    return "\n".join(lines)


def fleet_lines(fleet: FleetSummary) -> list[str]:
    """Return the summary of a fleet as text lines."""
    lines = [f"{fleet.engines} engines, {fleet.route} (prefix hits and TTFT by engine: report show)"]
    lines += [f"at {at_s:,.1f} s engine {name}: {what}" for at_s, what, name in fleet.events[:MOST_EVENTS_SHOWN]]
    if len(fleet.events) > MOST_EVENTS_SHOWN:
        lines.append(f"… and {len(fleet.events) - MOST_EVENTS_SHOWN} more events")
    return lines + [f"{count} requests failed: {error}" for error, count in fleet.not_served.items()]


def _shown_ms(ms: float | None) -> str:
    return NOTHING if ms is None else f"{ms:.1f}"
