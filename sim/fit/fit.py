"""``sim fit``: fit an engine's step times to captured traces."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, get_args

import numpy as np

from measure.table import table_lines
from measure.wording import NOTHING
from sim.fit.drift import INTERVAL, drift_of_mean, estimate_drift, widened
from sim.fit.identification import (
    Coverage,
    Unidentified,
    coverage_of,
    describe_open,
    find_unidentified,
    next_capture,
    next_seed,
    require_enough,
)
from sim.fit.pace import paced_model
from sim.fit.regression import bootstrap, estimate_noise
from sim.fit.residuals import Requests, baseline_errors, cohort_errors, locate_misfit
from sim.fit.schedule import Reconstruction
from sim.fit.variants import (
    CachedSource,
    Capture,
    Fit,
    Trial,
    Variant,
    choose,
    default_terms,
    fit_variant,
    prepare_capture,
    schedule_of,
    with_chosen_terms,
)
from sim.latency.modelfile import FitTrace, Model, Parameter, load_model, save_model
from sim.latency.terms import EXTRA_TERMS, TERMS, FrontendPlacement
from sim.vllm.config import add_engine_flags, engine_overrides
from sim.vllm.settings import Settings, model_name, settle
from sim.workload.arrivals import plan_arrivals
from tracefile import InputError, Meta, Record, load_trace, trace_digest
from tracefile.commandline.progress import counted
from tracefile.records.arrays import FloatArray
from tracefile.storage.output import MODEL, check_output

DRAWS = 64
"""Rows of the bootstrap that the model keeps."""


@dataclass(frozen=True, slots=True)
class FitConfig:
    """Settings of ``sim fit``."""

    traces: tuple[Path, ...]
    output: Path
    overrides: dict[str, Any]
    bootstrap: int = 400
    seed: int = 0
    cached: CachedSource = "factual"
    frontend: FrontendPlacement | None = None
    """None: try all, keep the best."""
    extra_terms: tuple[str, ...] | None = None
    """Terms beyond the default ones. None: those that predict captures which they were not fitted on."""
    residuals: bool = False
    held_out: Mapping[Path, frozenset[int]] = field(default_factory=dict)
    """Places of requests that a trace holds and the fit does not look at, but in the reconstruction of the schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="captures of one engine")
    parser.add_argument("-o", "--output", type=Path, required=True, help="model.json to write")
    pace = parser.add_argument_group("the pace of today, in place of a fit").add_argument
    pace("--pace-from", type=Path, metavar="CAPTURE", help="scale --latency-model by the step times of any traffic")
    pace("--latency-model", type=Path, metavar="MODEL", help="model.json whose shape stays")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples of the sessions (default 400; 0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0)")
    add_fit_flags(parser)
    add_engine_flags(parser)


def add_fit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cached",
        choices=get_args(CachedSource),
        default="factual",
        help="cached tokens as the traces report them (default), or as a simulated pool has them",
    )
    parser.add_argument(
        "--api-server",
        dest="frontend",
        choices=[*get_args(FrontendPlacement), "auto"],
        default="auto",
        help="API server: works on all requests at once (parallel), on one at a time (serial), or so on the engine's "
        "core (shared_core) (default auto: the simplest that predicts best)",
    )
    parser.add_argument(
        "--term",
        action="append",
        choices=[*EXTRA_TERMS, "none"],
        default=[],
        help="cost to fit beyond the default ones, as under sim serve; repeatable (none: no more; default: those "
        "that improve forecasts of sessions left out)",
    )
    parser.add_argument("--residuals", action="store_true", help="print TTFT errors by cohort and of two baselines")


def run(arguments: argparse.Namespace) -> int:
    """Fit; with ``--pace-from``, scale a model instead."""
    paced = (arguments.pace_from, arguments.latency_model)
    if paced == (None, None):
        if not arguments.traces:
            raise InputError("TRACE: none; expected captures of one engine")
        fit_and_save(read_config(arguments))
        return 0
    if None in paced or arguments.traces:
        raise InputError("--pace-from: expected --pace-from CAPTURE --latency-model MODEL -o OUT, and no TRACE")
    check_output(arguments.output, MODEL, paced, "--output")
    model = paced_model(load_model(arguments.latency_model), arguments.pace_from)
    save_model(model, arguments.output)
    print(model.diagnostics["pace"]["said"], f"{arguments.output}: written", sep="\n")
    return 0


def read_config(arguments: argparse.Namespace) -> FitConfig:
    """Read the command line. Raises InputError that names the flag."""
    if arguments.bootstrap < 0:
        raise InputError(f"--bootstrap: {arguments.bootstrap}; expected 0 or more")
    terms = arguments.term
    return FitConfig(
        traces=tuple(arguments.traces),
        output=arguments.output,
        overrides=engine_overrides(arguments),
        bootstrap=arguments.bootstrap,
        seed=arguments.seed,
        cached=arguments.cached,
        frontend=None if arguments.frontend == "auto" else arguments.frontend,
        extra_terms=tuple(name for name in dict.fromkeys(terms) if name != "none") if terms else None,
        residuals=arguments.residuals,
    )


def fit_and_save(config: FitConfig, to: TextIO | None = None) -> Model:
    """Fit, write model.json, print the fit to ``to`` (None: stdout)."""
    check_output(config.output, MODEL, config.traces, "--output")
    fitted = fit_traces(config)
    save_model(fitted.model, config.output)
    print(describe_fit(fitted.model), file=to)
    if fitted.unidentified:
        command = fitted.model.diagnostics["next_capture"]
        print("", *describe_open(fitted.unidentified, command, config.traces, config.output), sep="\n", file=to)
    if config.residuals:
        print(describe_misfit(fitted.requests), file=to)
    print(f"{config.output}: written", file=to)
    return fitted.model


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model and what its report needs."""

    model: Model
    unidentified: list[Unidentified]
    requests: Requests


def fit_traces(config: FitConfig) -> Fitted:
    if len(set(config.traces)) < len(config.traces):
        raise InputError(f"{config.traces[0]}: a trace is given twice; expected each once")
    loaded = {str(path): load_trace(path) for path in config.traces}
    settings = settle({path: meta for path, (meta, _) in loaded.items()}, config.overrides)
    if settings.assumed:
        told = ", ".join(f"{name} = {value}" for name, value in settings.assumed.items())
        print(f"sim fit: assumed, because no trace and no flag says: {told}", file=sys.stderr)
    variants = _variants(config, settings)
    captures = _prepare(loaded, variants[0], config)
    schedules = _schedules(captures, variants)
    terms = default_terms(config.extra_terms or ())
    fits = [
        fit_variant(captures, schedules[variant.config.async_scheduling], variant, terms)
        for variant in counted(variants, "variants")
    ]
    best, trials = choose(fits), list[Trial]()
    if config.extra_terms is None:
        best, trials = with_chosen_terms(best, captures, schedules[best.variant.config.async_scheduling])
    draws = bootstrap(best.seen, best.solution.weights, best.free, config.bootstrap, config.seed)
    coverage = coverage_of(best.seen, best.forecast, best.variant.config.max_num_batched_tokens)
    unidentified = find_unidentified(best.seen, best.free, best.parameters, draws, coverage)
    drift = estimate_drift(best.seen, best.parameters)
    parameters = _parameters(best, draws, unidentified, drift_of_mean(drift, len(captures)))
    model = Model(
        parameters=parameters,
        engine=best.variant.config,
        frontend_placement=best.variant.placement,
        noise=estimate_noise(best.seen, best.parameters),
        draws=[[float(f"{value:.6g}") for value in row] for row in draws[:DRAWS, best.free].tolist()],
        drift_log_sd=drift.log_sd,
        drift_freedom=drift.freedom,
        model_name=model_name([meta for meta, _ in loaded.values()]),
        fitted_on=[
            FitTrace(digest=trace_digest(path), name=path.name, requests=len(capture.fitted))
            for path, capture in zip(config.traces, captures, strict=True)
        ],
        diagnostics=_diagnostics(best, fits, trials, captures)
        | {
            "cached_tokens_from": config.cached,
            "assumed_settings": settings.assumed,
            "bootstrap": {"rounds": config.bootstrap, "seed": config.seed, "by": "session", "level": 0.95},
            "coverage": asdict(coverage),
            "unidentified": [asdict(one) for one in unidentified],
            "next_capture": next_capture(best.variant.config, next_seed([meta for meta, _ in loaded.values()]))
            if unidentified
            else None,
        },
        baselines=baseline_errors(best.forecast),
    )
    return Fitted(model, unidentified, best.forecast)


def _schedules(captures: Sequence[Capture], variants: Sequence[Variant]) -> dict[bool, list[Reconstruction]]:
    """Schedules of every capture, composed ahead or not: they do not depend on the API server."""
    configs = {variant.config.async_scheduling: variant.config for variant in variants}
    return {
        ahead: [schedule_of(capture, config) for capture in counted(captures, "schedules")]
        for ahead, config in configs.items()
    }


def _variants(config: FitConfig, settings: Settings) -> list[Variant]:
    """Shapes of engine that neither the traces nor the flags rule out."""
    placements = get_args(FrontendPlacement) if config.frontend is None else (config.frontend,)
    scheduling = (settings.config.async_scheduling,) if settings.scheduling_known else (False, True)
    return [
        Variant(replace(settings.config, async_scheduling=ahead), placement)
        for ahead in scheduling
        for placement in placements
    ]


def _prepare(loaded: dict[str, tuple[Meta, list[Record]]], variant: Variant, config: FitConfig) -> list[Capture]:
    captures = []
    for path, (meta, records) in loaded.items():
        cold = config.cached == "factual" and _hits_without_hashes(path, records)
        arrivals = plan_arrivals(meta, records, variant.config.block_size, path=path, cold_prompts=cold)
        capture = prepare_capture(records, arrivals, variant.config, config.cached)
        captures.append(replace(capture, held_out=config.held_out.get(Path(path), frozenset())))
    usable = [
        capture.arrivals[place].prompt_tokens - capture.cached_tokens[place]
        for capture in captures
        for place in capture.fitted
        if capture.arrivals[place].kind == "runs" and capture.records[place].ttft_ms is not None
    ]
    require_enough(np.array(usable), _gaps(captures))
    return captures


def _gaps(captures: Sequence[Capture]) -> int:
    return sum(len(capture.records[place].itl_ms) for capture in captures for place in capture.fitted)


def _hits_without_hashes(path: str, records: Sequence[Record]) -> bool:
    """True if a trace reports cached tokens but has no block hashes. Raises InputError if it has neither."""
    if any(record.block_hashes is not None for record in records):
        return False
    if all(record.cached_tokens is None for record in records):
        raise InputError(f"{path}: neither block_hashes nor cached_tokens in any record; expected one of them")
    return True


def _parameters(
    fit: Fit, draws: FloatArray, unidentified: Sequence[Unidentified], drift: float
) -> dict[str, Parameter]:
    """Parameters with the bootstrap's intervals, widened by the drift between the captures, a speed of all costs."""
    why = {one.name: one.why for one in unidentified}
    parameters = {}
    for column in fit.free:
        term = TERMS[column]
        value, low, high = float(fit.parameters[column]), None, None
        if len(draws):
            ends = np.quantile(draws[:, column], INTERVAL)
            low, high = widened(value, float(ends[0]), float(ends[1]), drift)
        parameters[term.name] = Parameter(
            value=value,
            unit=term.unit,
            low=low,
            high=high,
            identified=term.name not in why,
            note=why.get(term.name),
        )
    return parameters


def _diagnostics(
    best: Fit, fits: Sequence[Fit], trials: Sequence[Trial], captures: Sequence[Capture]
) -> dict[str, Any]:
    seen, requests = best.seen, best.forecast
    return {
        "requests": int((~requests.censored).sum()),
        "censored": int(requests.censored.sum()),
        "gaps": _gaps(captures),
        "intervals": {"prefill": int(seen.is_prefill.sum()), "decode": int((~seen.is_prefill).sum())},
        "misfits": best.misfits,
        "sessions": len(np.unique(seen.session)),
        "loss": round(best.loss, 6),
        "condition_number": round(best.solution.condition, 1),
        "prefill_relative_scale": round(best.solution.prefill_scale, 6),
        "decode_relative_scale": round(best.solution.decode_scale, 6),
        "variant": best.variant.name,
        "variants": {fit.variant.name: round(fit.loss, 6) for fit in fits},
        "terms": {" + ".join(("default", *trial.extra_terms)): round(trial.loss, 6) for trial in trials},
        "cached_agreement": _mean_agreement(captures),
        "errors": [asdict(errors) for errors in cohort_errors(requests)],
    }


def _mean_agreement(captures: Sequence[Capture]) -> float | None:
    told = [(capture.agreement, len(capture.records)) for capture in captures if capture.agreement is not None]
    return round(sum(share * count for share, count in told) / sum(count for _, count in told), 4) if told else None


def describe_fit(model: Model) -> str:
    facts = model.diagnostics
    intervals = facts["intervals"]
    lines = [
        f"{facts['requests']} TTFTs and {facts['gaps']} gaps in {facts['sessions']} sessions: {intervals['prefill']} "
        f"intervals with prefill, {intervals['decode']} of decodes; {facts['variant']}",
        f"{facts['misfits']} first tokens in another step than the rules put them; condition number "
        f"{facts['condition_number']:.0f}",
    ]
    lines.append(str(Coverage(**facts["coverage"])))
    if len(facts["variants"]) > 1:
        lines += [f"  loss {loss:.4f}  {name}" for name, loss in facts["variants"].items()]
    lines += [f"  held-out loss {loss:.4f}  {terms}" for terms, loss in facts["terms"].items()]
    if facts["cached_agreement"] is not None:
        lines.append(f"the rules give the reported cached tokens for {facts['cached_agreement']:.1%} of requests")
    lines += ["", *_parameter_lines(model), *_noise_lines(model), "", *_error_lines(model)]
    return "\n".join(lines)


def _parameter_lines(model: Model) -> list[str]:
    rows = []
    for name, parameter in model.parameters.items():
        interval = "" if parameter.low is None else f"{parameter.low:.4g} … {parameter.high:.4g}"
        mark = "" if parameter.identified else "  (not identified)"
        rows.append([name, f"{parameter.value:.4g}", interval, f"{parameter.unit}{mark}"])
    return table_lines(["parameter", "value", "95 % interval", "unit"], rows, "<><<")


def _noise_lines(model: Model) -> list[str]:
    noise, low, high = model.noise, model.noise.levels.index(0.1), model.noise.levels.index(0.9)
    spreads = [
        f"{step_ms:.3g} ms {row[low]:+.0%} … {row[high]:+.0%}"
        for step_ms, row in zip(noise.step_ms, noise.step_log_ratio, strict=True)
    ]
    front = noise.frontend_log_ratio
    least = "at least, from one capture, " if len(model.fitted_on) == 1 else ""
    return [
        f"noise, 8 steps of 10 within: {', '.join(spreads)}",
        f"autocorrelated share of a step's noise {noise.autocorrelated_share:.0%}, correlation time "
        f"{noise.correlation_time_ms / 1e3:.3g} s",
        f"API server {front[low]:+.0%} … {front[high]:+.0%}; another capture may differ by {least}"
        f"{model.drift_log_sd:.1%}",
    ]


def _error_lines(model: Model) -> list[str]:
    rows = [
        [
            errors["cohort"],
            str(errors["requests"]),
            *(NOTHING if errors[level] is None else f"{errors[level]:+.1%}" for level in ("p50", "p90", "p99")),
            f"{errors['median_abs']:.1%}",
            f"{errors['bias']:+.1%}",
        ]
        for errors in model.diagnostics["errors"]
    ]
    lines = table_lines(["TTFT error in sample", "n", "p50", "p90", "p99", "median |e|", "bias"], rows, "<")
    lines += [
        f"baseline {name.replace('_', ' ')} ({baseline.formula}): median |e| {baseline.median_abs_error:.1%}, "
        f"p90 |e| {baseline.p90_abs_error:.1%}"
        for name, baseline in model.baselines.items()
    ]
    return lines


def describe_misfit(requests: Requests) -> str:
    """Return TTFT errors before calibration along prompt length, depth and concurrency, in bins of equal count."""
    rows = [
        [
            *(cell.axis, f"{cell.low:.0f}", f"{cell.high:.0f}", str(cell.requests)),
            *(f"{cell.bias:+.1%}", f"{cell.bias_ms:+.1f}", f"{cell.median_abs:.1%}"),
        ]
        for cell in locate_misfit(requests)
    ]
    headings = ["along", "from", "to", "n", "bias", "bias ms", "median |e|"]
    return "\n".join(["", *table_lines(headings, rows, "<")])
