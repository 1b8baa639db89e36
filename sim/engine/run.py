"""``sim run``: predict what an engine would do with a trace, as a trace."""

import argparse
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from measure.enginesteps import header_of
from measure.quantiles import quantile_place
from measure.table import table_lines
from measure.wording import NOTHING, rests_on
from sim.engine.deployment import Deployment, add_deployment_flags, deployment_of
from sim.engine.fleetplan import add_fleet_flags
from sim.latency.modelfile import Model, engine_with, load_model
from sim.latency.verdicts import engine_warning, verdict_sentence
from sim.vllm.config import EngineConfig, add_engine_flags, engine_overrides
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import Chains
from tracefile import InputError, Meta, Record, TraceReader, TraceWriter, open_trace, trace_digest
from tracefile.commandline.parser import seed
from tracefile.files.writing import check_new, lines_file, new_writer
from tracefile.records.arrays import FloatArray
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from measure import survival
    from sim.engine import fleetrun, simstate, steplog, streaming, tiers
    from sim.engine import results as outcomes
    from sim.engine.fleet import FleetEngine
    from sim.engine.fleetrun import DeployedRun, FleetSummary
    from sim.engine.steplog import StepLog
    from sim.engine.streaming import StreamingRun
    from sim.engine.tiers import TierTraffic
    from sim.kernels.layout import SimState
    from sim.workload import arrivalorder
    from sim.workload import arrivals as planning
    from sim.workload.arrivalorder import Order, Part
    from sim.workload.arrivals import Arrivals
    from tracefile import outputs
    from tracefile.records import batches
    from tracefile.records.batches import Batch
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    survival = LateModule("measure.survival")
    fleetrun, outcomes, simstate, steplog, streaming, tiers = late_modules(
        "sim.engine", "fleetrun results simstate steplog streaming tiers"
    )
    arrivalorder, planning = late_modules("sim.workload", "arrivalorder arrivals")
    batches = LateModule("tracefile.records.batches")
    outputs = LateModule("tracefile.outputs")


ROUNDING_MS = 0.001
"""More than what rounding can do to a record's end."""
_LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class CohortSummary:
    """TTFT of a cohort's requests, ms; aborts before a first token are censored. None: past the last first token."""

    name: str
    requests: int
    """Requests that waited for a first token."""
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A predicted trace in a few lines."""

    requests: int
    not_ok: int
    unservable: int
    """Part of ``not_ok``: requests too long for this engine."""
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    arrivals_ms: float
    drain_ms: float
    """From the last arrival to the last end."""
    cohorts: list[CohortSummary]
    fleet: "FleetSummary | None" = None
    """None: one engine."""
    tiers: "TierTraffic | None" = None
    """None: no memory behind the pool."""
    assumptions: tuple[str, ...] = ()
    """Of memory, workers and GPUs: nothing here could confirm them."""

    @property
    def is_overrun(self) -> bool:
        """True if the engine needs longer to finish than the arrivals took, and longer than a minute."""
        return self.drain_ms > max(self.arrivals_ms, 60_000.0)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Tally:
    """Counts predicted records as they are written."""

    def __init__(self) -> None:
        self._requests = self._not_ok = self._unservable = self._prompt_tokens = self._cached_tokens = 0
        self._first_ms, self._last_ms, self._end_ms = math.inf, -math.inf, -math.inf
        self._waits_ms = {name: array("d") for name in ("all", "turn 1", "turns 2+")}
        self._ends = {name: array("b") for name in self._waits_ms}

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._requests += 1
            self._not_ok += record.status != "ok"
            self._unservable += record.error == outcomes.FAILURES["unservable"]
            self._note_span(record.arrival_ms or 0.0, record.e2e_ms or 0.0)
            if record.cached_tokens is not None:
                self._prompt_tokens += record.prompt_tokens or 0
                self._cached_tokens += record.cached_tokens
            self._note_wait(record)

    def _note_wait(self, record: Record) -> None:
        end = survival.EVENT if record.ttft_ms is not None else survival.END_OF_STATUS[record.status]
        wait_ms = record.e2e_ms if record.ttft_ms is None else record.ttft_ms
        if wait_ms is None or (record.ttft_ms is None and end == survival.EVENT):  # not streamed: there was no wait
            return
        turn = () if record.turn is None else ("turn 1" if record.turn == 1 else "turns 2+",)
        for name in ("all", *turn):
            self._waits_ms[name].append(wait_ms)
            self._ends[name].append(end)

    def _note_span(self, arrival_ms: float, e2e_ms: float) -> None:
        self._first_ms = min(self._first_ms, arrival_ms)
        self._last_ms = max(self._last_ms, arrival_ms)
        self._end_ms = max(self._end_ms, arrival_ms + e2e_ms)

    def summary(self, preemptions: int, steps: int) -> Summary:
        return Summary(
            requests=self._requests,
            not_ok=self._not_ok,
            unservable=self._unservable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=preemptions,
            steps=steps,
            arrivals_ms=self._last_ms - self._first_ms if self._requests else 0.0,
            drain_ms=self._end_ms - self._last_ms if self._requests else 0.0,
            cohorts=[
                _cohort(name, waits_ms, self._ends[name]) for name, waits_ms in self._waits_ms.items() if waits_ms
            ],
        )


def _cohort(name: str, waits_ms: "array[float]", ends: "array[int]") -> CohortSummary:
    times_ms, end = np.array(waits_ms), np.array(ends, dtype=np.int8)
    if end.any():
        waits = survival.make_waits(times_ms, end, np.arange(len(times_ms)))
        found = survival.quantiles(waits, survival.incidence(waits), np.array(_LEVELS)).tolist()
    else:
        places = [quantile_place(level, len(times_ms)) for level in _LEVELS]
        found = np.partition(times_ms, places)[places].tolist()
    p50, p90, p99 = (value if math.isfinite(value) else None for value in found)
    return CohortSummary(name, len(times_ms), p50, p90, p99)


EPILOG = """\
examples:
  sim run monday.jsonl.zst --latency-model model.json -o predicted.jsonl.zst
  sim run monday.jsonl.zst --latency-model model.json -o fleet.jsonl.zst --replicas 4 --route overlap
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace to predict; never one that the model was fitted on")
    parser.add_argument(
        "--latency-model",
        type=Path,
        required=True,
        action="append",
        help="model.json from sim fit; several: one for each engine of a fleet",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="predicted trace (.gz and .zst compress)",
    )
    add_engine_flags(parser)
    add_fleet_flags(parser, several=False)
    add_deployment_flags(parser)
    parser.add_argument("--cold-prompts", action="store_true", help="nothing is shared: every block is unique")
    parser.add_argument(
        "--replay-sessions", action="store_true", help="a turn comes its think time after its parent's predicted end"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the noise")
    parser.add_argument("--no-noise", action="store_true", help="medians instead of draws")
    parser.add_argument(
        "--steps",
        type=Path,
        help="write the engine's steps as JSON Lines, for report show --steps; of a fleet's engine 2 to FILE with .2",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the outputs if they exist")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Predict, write, summarize. 1 if the engine could serve no request at all."""
    with batches.without_collector():
        summary = predict_trace(arguments)
    found = {**asdict(summary), "hit_rate": summary.hit_rate}
    found = {name: value for name, value in found.items() if value or name not in ("fleet", "tiers", "assumptions")}
    print(json.dumps(found) if arguments.json else _as_text(summary, arguments.output))
    return 1 if summary.unservable and not summary.steps else 0


def predict_trace(arguments: argparse.Namespace) -> Summary:
    trace, seed, deployment = arguments.trace, None if arguments.no_noise else arguments.seed, deployment_of(arguments)
    models = [load_model(path) for path in arguments.latency_model]
    model, digest = models[0], trace_digest(trace)
    for one in models:
        one.refuse_fit_traces(digest, trace)
    engine = _deployed(model, arguments, deployment)
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
        said = verdict_sentence(arguments.latency_model[0], model, digest, reader.meta)
        for line in (*engine_warning(model, reader.meta), said):
            print(f"sim run: {line}", file=sys.stderr)
        header = msgspec.structs.replace(header, extra={**header.extra, "validation": said, **deployment.meta()})
        parts = arrivals_in_parts(reader, engine, arguments)
        first = next(parts)  # what is wrong with the trace is said before there is an output
        inputs = [trace, *arguments.latency_model]
        deployment.require_room(first.arrivals, engine.block_size)
        if fleetrun.asks_fleet(arguments, models) or deployment.workers:
            arrivals = first.arrivals.followed_by(*(part.arrivals for part in parts))
            run = fleetrun.DeployedRun(lambda one: _deployed(one, arguments, deployment), deployment, seed)
            summary = _predict_fleet(arguments, header, arrivals, models, run)
            return replace(summary, assumptions=tuple(deployment.assumptions()))
        with (
            _loop(arguments, header, engine) as run_on,
            new_writer(arguments.output, header, inputs=inputs, overwrite=arguments.overwrite) as writer,
        ):
            simulation, tally = (
                streaming.StreamingRun(engine, deployment.model(model), seed, run_on, deployment=deployment.tiers),
                Tally(),
            )
            records = predicted_records(
                chain([first], parts), simulation, tally, engine.block_size, keep_hashes=not arguments.cold_prompts
            )
            for record in records:
                writer.write(record if isinstance(writer, TraceWriter) else with_gaps_as_numbers(record))
        summary = tally.summary(simulation.preemptions, simulation.engine_steps)
        return replace(summary, tiers=simulation.traffic, assumptions=tuple(deployment.assumptions()))


def _deployed(model: Model, arguments: argparse.Namespace, deployment: Deployment) -> EngineConfig:
    """Return a model's engine with the settings that the flags and the deployment ask for."""
    overrides = engine_overrides(arguments)
    engine = engine_with(model.engine, overrides)
    return engine_with(engine, deployment.engine(engine, overrides))


def _predict_fleet(
    arguments: argparse.Namespace,
    header: Meta,
    arrivals: "Arrivals",
    models: list[Model],
    run: "DeployedRun",
) -> Summary:
    """Predict a whole trace on the fleet that the flags ask for."""
    inputs = [arguments.trace, *arguments.latency_model]
    check_new(arguments.output, inputs=inputs, overwrite=arguments.overwrite)
    logs = partial(_fleet_logs, arguments, header)
    found = fleetrun.simulate_fleet(arguments, arrivals, models, run, open_logs=logs)
    header = msgspec.structs.replace(header, extra={**header.extra, "fleet": found.meta()})
    order, tally = outcomes.FinishOrder(), Tally()
    with new_writer(arguments.output, header, inputs=inputs, overwrite=arguments.overwrite) as writer:
        for result in found.results():
            order.add(result, found.block_size, keep_hashes=not arguments.cold_prompts)
        records = order.release()
        for record in records:
            writer.write(record if isinstance(writer, TraceWriter) else with_gaps_as_numbers(record))
        tally.add(records)
    summary = tally.summary(found.preemptions, found.engine_steps)
    return replace(summary, fleet=found.summary(records), tiers=found.traffic if run.deployment.tiers else None)


@contextmanager
def _loop(arguments: argparse.Namespace, header: Meta, engine: EngineConfig) -> "Iterator[Callable[[SimState], int]]":
    """Give the loop, or one that writes its steps where ``--steps`` says."""
    if arguments.steps is None:
        yield simstate.loop_of(engine)
        return
    with _step_log(arguments, arguments.steps, header, engine) as log:
        yield log.run


@contextmanager
def _step_log(arguments: argparse.Namespace, path: Path, header: Meta, engine: EngineConfig) -> "Iterator[StepLog]":
    inputs = [arguments.trace, *arguments.latency_model, arguments.output]
    with lines_file(path, inputs=inputs, overwrite=arguments.overwrite, flag="--steps") as take:
        take(msgspec.json.encode(header_of(header, engine.usable_blocks)) + b"\n")
        yield steplog.StepLog(take, simstate.loop_of(engine))


@contextmanager
def _fleet_logs(
    arguments: argparse.Namespace, header: Meta, engines: "Sequence[FleetEngine]"
) -> "Iterator[Sequence[StepLog]]":
    """Give a log for each engine where ``--steps`` is given: of engine 2 in ``steps.2.jsonl``, from 0 on."""
    if arguments.steps is None:
        yield ()
        return
    name, dot, ending = arguments.steps.name.partition(".")
    paths = [arguments.steps.with_name(f"{name}.{place}{dot}{ending}") for place in range(len(engines))]
    with ExitStack() as stack:
        yield [
            stack.enter_context(_step_log(arguments, path, header, engine.config))
            for path, engine in zip(paths, engines, strict=True)
        ]


def with_gaps_as_numbers(record: Record) -> Record:
    """``record`` with the gaps that were only to be written, as JSON, read: columns hold numbers."""
    if isinstance(record.itl_ms, msgspec.Raw):
        record.itl_ms = msgspec.json.decode(record.itl_ms, type=list[float])
        record.itl_tokens = [1] * len(record.itl_ms)
    return record


def predicted_records(
    parts: "Iterable[Part]", simulation: "StreamingRun", tally: Tally, block_size: int, *, keep_hashes: bool = True
) -> Iterator[Record]:
    """Simulate arrivals that come in parts, and give each record as soon as nothing can come before it."""
    order = outcomes.FinishOrder()
    for part in parts:
        for results in simulation.feed(*part):
            for result in results:
                order.add(result, block_size, keep_hashes=keep_hashes)
            released = order.release(simulation.certain_until_ms - ROUNDING_MS, simulation.in_flight_ms)
            tally.add(released)
            yield from released
    released = order.release()
    tally.add(released)
    yield from released


def arrivals_in_parts(reader: TraceReader, engine: EngineConfig, arguments: argparse.Namespace) -> "Iterator[Part]":
    trace: Path = arguments.trace
    plan = planning.BatchPlan(Chains(reader.meta, engine.block_size), trace, arguments.cold_prompts)
    plan.inferred = None if arguments.cold_prompts else outputs.inferred_outputs(reader)
    batches, order = sessions_of(reader, trace) if arguments.replay_sessions else roots_of(reader, trace)
    parts = arrivalorder.in_parts(plan.every(batches), order)
    first = next(parts, None)
    if first is None:
        raise InputError(f"{trace}: no records; expected at least one request")
    plan.require_hashes()
    yield first
    yield from parts
    part = rests_on(plan.hashed, plan.requests, "block hashes")
    for warning in [*reader.warnings, *([f"hits are {part}"] if part else [])]:
        print(f"warning: {warning}", file=sys.stderr)


def roots_of(reader: TraceReader, path: Path) -> "tuple[Iterable[Batch], Order]":
    """A trace's batches and the order of their arrivals. Only a large trace is read twice for it."""
    batches, first = reader.batches(), []
    for batch in batches:
        first.append(batch)
        if sum(map(len, first)) > arrivalorder.PART:
            with open_trace(path) as again:
                return chain(first, batches), arrivalorder.by_arrival(_arrivals_ms(again.batches()))
    return first, arrivalorder.by_arrival(_arrivals_ms(first))


def sessions_of(reader: TraceReader, path: Path) -> "tuple[Iterable[Batch], Order]":
    """A trace's batches and the order in which each waits for its parent; no session recorded: from the hashes."""
    with open_trace(path) as again:
        order = arrivalorder.by_session(again.batches(), path)
    if (order.parents != planning.NOBODY).any() or not len(order.numbers):
        return reader.batches(), order
    records = arrivalorder.linked_records(reader.meta, list(reader), path)
    return [batches.RecordBatch(records)], arrivalorder.by_session([batches.RecordBatch(records)], path)


def _arrivals_ms(batches: "Iterable[Batch]") -> FloatArray:
    return np.concatenate([np.empty(0), *(batch.times("arrival_ms") for batch in batches)])


def _as_text(summary: Summary, output: Path) -> str:
    too_long = f" ({summary.unservable} too long for this engine)" if summary.unservable else ""
    lines = [
        f"{output}: {summary.requests} requests, {summary.not_ok} not ok{too_long}; {summary.steps} steps, "
        f"{summary.preemptions} preemptions; {summary.hit_rate:.1%} of prompt tokens cached",
    ]
    rows = [
        [
            one.name,
            str(one.requests),
            *(NOTHING if ms is None else f"{ms:.1f}" for ms in (one.p50_ms, one.p90_ms, one.p99_ms)),
        ]
        for one in summary.cohorts
    ]
    lines += table_lines(["TTFT ms", "n", "p50", "p90", "p99"], rows, "<", gap="    ")
    if summary.fleet is not None:
        lines += fleetrun.fleet_lines(summary.fleet)
    if summary.tiers is not None:
        lines.append(tiers.traffic_sentence(summary.tiers))
    lines += [f"assumed: {one}" for one in summary.assumptions]
    if summary.is_overrun:
        came_s, drain_s = summary.arrivals_ms / 1e3, summary.drain_ms / 1e3
        lines.append(
            f"overrun: {came_s:,.0f} s of arrivals kept the engine busy for {drain_s:,.0f} s more: they come faster "
            "than it serves them, and TTFTs say how long the trace is"
        )
    return "\n".join(lines)
