"""``sim validate``: compare the measured latency of a capture with an ensemble of forecasts, by cohort."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure import runs as recording
from measure.cohorts import ALL
from measure.metrics.flags import checked_bootstrap
from measure.runs import Run
from measure.thresholds import TOO_UNCERTAIN
from report.compare import comparison, panels
from report.compare import gates as gating
from report.compare.brief import brief_tables
from report.compare.comparison import Compared
from report.compare.results import LEVELS
from report.compare.results import Forecast as Facts
from report.output import page_path, write_page
from report.pages.panels import print_page
from sim.engine import results as outcomes
from sim.engine import simulatedrequest as layout
from sim.fit import pace as pacing
from sim.fit.pace import Pace
from sim.forecast import ensemble, saturation
from sim.forecast import fleets as running
from sim.forecast.captured import Captured, plan, read_captured
from sim.forecast.ensemble import Forecast
from sim.forecast.scenarios import Scenario
from sim.latency.fittraces import refuse_fitted
from sim.latency.modelfile import Model, load_model, model_digest
from sim.latency.verdicts import Verdict, engine_differences, engine_named, keep_verdict, verdicts_path
from sim.vllm.config import engine_overrides
from tracefile.commandline.printing import print_json
from tracefile.commandline.progress import counted
from tracefile.files.digest import trace_digest
from tracefile.files.reading import open_trace
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.output import refuse_inputs

CAPTURED, AGAIN, PREDICTED, COLD, COLD_PREDICTED = "captured", "again", "predicted", "cold", "cold-predicted"


@dataclass(frozen=True, slots=True)
class ValidateConfig:
    """Settings of ``sim validate``."""

    trace: Path
    overrides: dict[str, Any]
    members: int
    seed: int
    bootstrap: int
    gates: tuple[str, ...]
    standard: bool
    json: bool
    verbose: bool = False
    html: Path | None = None
    again: tuple[Path, ...] = ()
    cold: tuple[Path, ...] = ()
    """Captures without shared prefixes: the first is forecast, the others repeat it."""


def run(arguments: argparse.Namespace) -> int:
    """Forecast, evaluate gates, print; 1 if a gate fails, 3 if the result is too uncertain."""
    config = replace(
        read_config(arguments, arguments.trace),
        again=tuple(arguments.repeat),
        cold=tuple(arguments.cold),
    )
    inputs = [config.trace, arguments.latency_model, *config.again, *config.cold]
    config = replace(config, html=page_path(arguments, inputs))
    refuse_inputs(verdicts_path(arguments.latency_model), inputs, "verdicts in")
    model = load_model(arguments.latency_model)
    compared = validate(config, model)
    keep_gates(arguments.latency_model, model, config.trace.name, compared)
    if config.json:
        print_json(compared.result)
    return report(config, compared)


def keep_gates(path: Path, model: Model, trace: str, compared: Compared) -> None:
    """Store the gate results beside the latency model in ``path``; ``trace``: its name in them."""
    gates, run = compared.result.gates, compared.runs[CAPTURED]
    untested = [gate.name for gate in gates if gate.state == "not tested"]
    ttft = compared.result.pairs[PREDICTED].cohorts[ALL].ttft
    errors = {level: getattr(ttft, level) for level in LEVELS}
    verdict = Verdict(
        model_digest=model_digest(model),
        trace=trace,
        trace_digest=run.digest,
        engine=engine_named(run.meta),
        gates=len(gates) - len(untested),
        failed=gating.failures(gates),
        uncertain=gating.failures(gates, TOO_UNCERTAIN),
        untested=untested,
        passed=[gate.name for gate in gates if gate.state == "passed"],
        errors={name: error.signed_error for name, error in errors.items() if error and error.signed_error is not None},
    )
    keep_verdict(path, verdict)


def read_config(arguments: argparse.Namespace, trace: Path) -> ValidateConfig:
    checked_bootstrap(arguments.bootstrap)
    if arguments.members < 1:
        raise InputError(f"--members {arguments.members}: expected 1 or more")
    return ValidateConfig(
        trace=trace,
        overrides=engine_overrides(arguments),
        members=arguments.members,
        seed=arguments.seed,
        bootstrap=arguments.bootstrap,
        gates=tuple(arguments.gate),
        standard=not arguments.no_default_gates,
        json=arguments.json,
        verbose=arguments.verbose,
    )


def report(config: ValidateConfig, compared: Compared, *, silent: bool = False) -> int:
    page = panels.comparison_page(compared, brief_tables(compared.result))
    if config.html is not None:
        write_page(config.html, page)
    if not silent:
        print_page(page, beside_json=config.json, verbose=config.verbose)
    return gating.exit_code(compared.result.gates)


def validate(config: ValidateConfig, model: Model) -> Compared:
    """Read captures, forecast latency, evaluate gates. Raises InputError if the model was fitted on a capture."""
    again, cold = _numbered(AGAIN, config.again), _numbered(COLD, config.cold)
    for path in (*again.values(), *cold.values()):
        with open_trace(path) as reader:
            refuse_fitted(model.fitted_on, path, trace_digest(path), reader)
    captured = read_captured(config.trace, model)
    paths = {CAPTURED: config.trace, **again, **cold}
    runs = {label: recording.load_run(label, path) for label, path in paths.items()}
    captured_run = runs[CAPTURED]
    repeats = {**dict.fromkeys(again, CAPTURED), **{label: COLD for label in cold if label != COLD}}
    tasks = [(PREDICTED, CAPTURED, Scenario(config.overrides, cold_prompts=captured.cold))]
    if cold:
        tasks.append((COLD_PREDICTED, COLD, _without_sharing(runs[COLD].meta, config.overrides)))
    predicted = {}
    for label, truth, scenario in tasks:
        predicted[label] = comparison.Predicted(truth, *_predict(config, model, captured, scenario, captured_run))
        reference = captured if truth == CAPTURED else read_captured(paths[truth], model)
        if (pace := _capture_pace(model, reference)) is not None:
            forecasts = _predict(config, model, captured, scenario, captured_run, pace=pace)
            predicted[f"{label}-at-pace"] = comparison.Predicted(truth, *forecasts)
    return comparison.evaluate_forecasts(
        runs,
        predicted,
        repeats=repeats,
        gates=config.gates,
        standard=config.standard,
        seed=config.seed,
        bootstrap=config.bootstrap,
    )


def _capture_pace(model: Model, captured: Captured) -> Pace | None:
    base, name = msgspec.structs.replace(model, engine=captured.engine), str(captured.path)
    try:
        return pacing.measure_pace(pacing.capture_steps(captured.meta, list(captured.records), base, name), base, name)
    except InputError as error:
        print(f"sim validate: no forecast at the capture's pace: {error}", file=sys.stderr)
        return None


def _predict(
    config: ValidateConfig,
    fitted: Model,
    captured: Captured,
    scenario: Scenario,
    run: Run,
    *,
    pace: Pace | None = None,
) -> "tuple[list[Run], Facts]":
    load, model = plan(captured, scenario), fitted if pace is None else pacing.with_pace(fitted, pace)
    description = "forecasts" if pace is None else "forecasts at the capture's pace"
    progress = counted(range(config.members), f"{config.trace.name}, {description}")
    point, utilization = running.point_of(load, model)
    models = ensemble.members(model, config.members, config.seed, saturation.beyond_log_sd(point, model))
    forecast = running.forecast_load(load, models, seed=config.seed, done=lambda: next(progress, None))
    facts = Facts(
        model_digest=model_digest(model),
        members=config.members,
        seed=config.seed,
        pacing="sessions" if captured.paced else "recorded",
        cold_prompts=scenario.cold_prompts,
        settings=asdict(load.engine),
        utilization=utilization,
        saturated=utilization >= 1.0,
        preempted=int((np.median(forecast.preemptions, axis=0) > 0).sum()),
        fitted_captures=len(model.fitted_on),
        drift_log_sd=model.drift_log_sd,
        pace=None if pace is None else pace.factor,
        other_settings=list(engine_differences(model, captured.meta, load.engine)),
        beyond_fit=list(saturation.beyond_fit(point, model)),
    )
    meta = outcomes.predicted_meta(
        captured.meta,
        model,
        load.engine,
        captured.digest,
        replay_sessions=captured.paced,
        cold_prompts=scenario.cold_prompts,
        seed=config.seed,
    )
    blank = replace(run.without_gaps(), meta=meta, warnings=())
    return [member_run(forecast, number, blank) for number in range(forecast.members)], facts


def member_run(forecast: Forecast, number: int, run: Run) -> Run:
    outcome = forecast.outcome[number]
    copied = outcome == layout.AS_RECORDED
    failed = (outcome == layout.UNSERVABLE) | (outcome == layout.PARENT_FAILED)
    status = np.where(outcome == layout.OK, recording.STATUSES.index("ok"), run.status)
    streamed = run.streamed & ~copied

    def pick(predicted: FloatArray, recorded: FloatArray) -> FloatArray:
        return np.asarray(np.where(copied, recorded, predicted))

    arrival_ms, e2e_ms = (
        pick(forecast.arrival_ms[number], run.arrival_ms),
        pick(forecast.e2e_ms[number], run.e2e_ms),
    )
    return replace(
        run,
        arrival_ms=arrival_ms,
        scheduled_ms=np.full(len(run), np.nan),
        ttft_ms=np.where(streamed | copied, pick(forecast.ttft_ms[number], run.ttft_ms), np.nan),
        tpot_ms=np.where(streamed, forecast.tpot_ms[number], np.nan),
        e2e_ms=e2e_ms,
        status=np.where(failed, recording.STATUSES.index("error"), status).astype(np.int8),
        cached_tokens=np.where(copied | failed, recording.UNKNOWN, forecast.cached_tokens[number]),
        concurrency=_in_flight(arrival_ms, e2e_ms),
    )


def _in_flight(arrival_ms: FloatArray, e2e_ms: FloatArray) -> IntArray:
    starts_ms, ends_ms = np.sort(arrival_ms), np.sort(arrival_ms + e2e_ms)
    counts = np.searchsorted(starts_ms, arrival_ms, side="right") - np.searchsorted(ends_ms, arrival_ms, side="right")
    return np.where(np.isnan(arrival_ms), recording.UNKNOWN, np.maximum(counts, 1))


def _without_sharing(cold: Meta, overrides: Mapping[str, Any]) -> Scenario:
    if cold.workload and cold.workload.cold_prompts:
        return Scenario(dict(overrides), cold_prompts=True)
    return Scenario({**overrides, "enable_prefix_caching": False})


def _numbered(label: str, paths: Sequence[Path]) -> dict[str, Path]:
    return {label if number == 1 else f"{label}-{number}": path for number, path in enumerate(paths, 1)}
