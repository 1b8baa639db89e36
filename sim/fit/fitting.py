"""Fit of a latency model to traces; priors replace parameters that the traces do not identify."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from sim.fit.drift import INTERVAL, drift_of_mean, estimate_drift, widened
from sim.fit.identification import (
    Coverage,
    Unidentified,
    coverage_of,
    find_unidentified,
    next_capture,
    require_enough,
)
from sim.fit.priors import DEFAULTS, Priors, default_priors
from sim.fit.regression import bootstrap, estimate_noise
from sim.fit.residuals import errors_in_sample
from sim.fit.schedule import Reconstruction
from sim.fit.variants import (
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
from sim.latency.fittraces import FitTrace, fit_trace, refuse_fitted
from sim.latency.modelfile import Model, Parameter
from sim.latency.terms import TERMS, FrontendPlacement
from sim.latency.verdicts import engine_named
from sim.vllm.settings import Settings, model_name, resolve_settings
from sim.workload.arrivals import plan_arrivals
from tracefile.commandline.progress import counted
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

Loaded = Mapping[str, tuple[Meta, list[Record]]]
"""Traces by path."""
DRAWS = 64
"""Bootstrap draws stored in the model."""


@dataclass(frozen=True, slots=True)
class FitConfig:
    """Settings of a latency model fit."""

    traces: tuple[Path, ...]
    output: Path
    overrides: dict[str, Any]
    bootstrap: int = 400
    seed: int = 0
    frontend: FrontendPlacement | None = None
    """None: fit all placements, choose the best."""
    extra_terms: tuple[str, ...] | None = None
    """Terms added to the default terms. None: terms that lower the error on held-out captures."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted latency model and its unidentified parameters."""

    model: Model
    unidentified: list[Unidentified]


def fit_traces(config: FitConfig) -> Fitted:
    """Fit a latency model to different traces; print assumed engine settings to stderr. Raises InputError."""
    loaded = {str(path): load_trace(path) for path in config.traces}
    sources: list[FitTrace] = []
    for path in config.traces:
        digest, records = trace_digest(path), loaded[str(path)][1]
        refuse_fitted(sources, path, digest, records)
        sources.append(fit_trace(path, digest, records))
    settings = resolve_settings({path: meta for path, (meta, _) in loaded.items()}, config.overrides)
    if settings.assumed:
        assumptions = ", ".join(f"{name} = {value}" for name, value in settings.assumed.items())
        print(
            f"sim calibrate: assumed engine settings (not in traces or flags): {assumptions}",
            file=sys.stderr,
        )
    solved = _solve(config, loaded, settings)
    metas = [meta for meta, _ in loaded.values()]
    return Fitted(_model_of(solved, config, settings, metas, sources), solved.unidentified)


@dataclass(frozen=True, slots=True)
class _Solved:
    """Parameters of the chosen variant, after priors."""

    captures: list[Capture]
    fits: list[Fit]
    """Fits of all variants, before priors."""
    trials: list[Trial]
    best: Fit
    draws: FloatArray
    coverage: Coverage
    unidentified: list[Unidentified]
    assumed: Priors


def _solve(config: FitConfig, loaded: Loaded, settings: Settings) -> _Solved:
    variants = _variants(config, settings)
    captures = _prepare(loaded, variants[0])
    require_enough(_uncached(captures), _gaps(captures))
    schedules = _schedules(captures, variants)
    terms = default_terms(config.extra_terms or ())
    fits = [
        fit_variant(captures, schedules[variant.config.async_scheduling], variant, terms)
        for variant in counted(variants, "fit, shapes of engine tried")
    ]
    best, trials = choose(fits), list[Trial]()
    schedules_used = schedules[best.variant.config.async_scheduling]
    if config.extra_terms is None:
        best, trials = with_chosen_terms(best, captures, schedules_used)
    draws = bootstrap(best.observed, best.solution.weights, best.free, config.bootstrap, config.seed)
    coverage = coverage_of(best.observed, best.forecast, best.variant.config.max_num_batched_tokens)
    unidentified = find_unidentified(best.observed, best.free, best.parameters, draws, coverage)
    assumed = default_priors([parameter.name for parameter in unidentified], best.parameters)
    if len(assumed.rows):
        best = fit_variant(captures, schedules_used, best.variant, best.terms, assumed)
        draws = bootstrap(
            best.observed, best.solution.weights, best.free, config.bootstrap, config.seed, assumed=assumed
        )
    return _Solved(captures, fits, trials, best, draws, coverage, unidentified, assumed)


def _model_of(
    solved: _Solved, config: FitConfig, settings: Settings, metas: Sequence[Meta], sources: Sequence[FitTrace]
) -> Model:
    best, unidentified = solved.best, solved.unidentified
    drift = estimate_drift(best.observed, best.parameters)
    parameters = _parameters(best, solved.draws, drift_of_mean(drift, len(sources)))
    return Model(
        parameters=_with_notes(parameters, unidentified, solved.assumed),
        engine=best.variant.config,
        frontend_placement=best.variant.placement,
        noise=estimate_noise(best.observed, best.parameters),
        draws=[[float(f"{value:.6g}") for value in row] for row in solved.draws[:DRAWS, best.free].tolist()],
        drift_log_sd=drift.log_sd,
        drift_freedom=drift.freedom,
        model_name=model_name(metas),
        fitted_on=list(sources),
        diagnostics=_diagnostics(best, solved.fits, solved.trials, solved.captures)
        | {
            "engine": _engine_of(metas),
            "assumed_settings": settings.assumed,
            "bootstrap": {"rounds": config.bootstrap, "seed": config.seed, "by": "session", "level": 0.95},
            "coverage": asdict(solved.coverage),
            "unidentified": [asdict(parameter) for parameter in unidentified],
            "next_capture": next_capture(best.variant.config) if unidentified else None,
        },
    )


def _engine_of(metas: Sequence[Meta]) -> dict[str, str]:
    engines = [{name: value for name, value in engine_named(meta).items() if name != "model"} for meta in metas]
    return engines[0] if all(engine == engines[0] for engine in engines) else {}


def _schedules(captures: Sequence[Capture], variants: Sequence[Variant]) -> dict[bool, list[Reconstruction]]:
    """Return the reconstructed schedules by async scheduling; the API server placement does not matter."""
    configs = {variant.config.async_scheduling: variant.config for variant in variants}
    reconstructions: dict[bool, list[Reconstruction]] = {ahead: [] for ahead in configs}
    for ahead, capture in counted(list(product(configs, captures)), "fit, steps rebuilt"):
        reconstructions[ahead].append(schedule_of(capture, configs[ahead]))
    return reconstructions


def _variants(config: FitConfig, settings: Settings) -> list[Variant]:
    placements = get_args(FrontendPlacement) if config.frontend is None else (config.frontend,)
    scheduling = (settings.config.async_scheduling,) if settings.scheduling_recorded else (False, True)
    return [
        Variant(replace(settings.config, async_scheduling=ahead), placement)
        for ahead in scheduling
        for placement in placements
    ]


def _prepare(loaded: Loaded, variant: Variant) -> list[Capture]:
    captures = []
    for path, (meta, records) in loaded.items():
        cold = _hits_without_hashes(path, records)
        arrivals = plan_arrivals(meta, records, variant.config.block_size, path=path, cold_prompts=cold)
        captures.append(prepare_capture(records, arrivals, variant.config, path))
    return captures


def _uncached(captures: Sequence[Capture]) -> FloatArray:
    uncached = []
    for capture in captures:
        has_ttft = np.array([record.ttft_ms is not None for record in capture.records], bool)
        tokens = capture.arrivals.prompt_tokens - np.array(capture.cached_tokens, np.int64)
        uncached.append(tokens[capture.arrivals.runs & has_ttft])
    return np.concatenate(uncached)


def _gaps(captures: Sequence[Capture]) -> int:
    return sum(len(record.itl_ms) for capture in captures for record in capture.records)


def _hits_without_hashes(path: str, records: Sequence[Record]) -> bool:
    """Return if a trace reports cached tokens but no block hashes. Raises InputError if it has neither."""
    if any(record.block_hashes is not None for record in records):
        return False
    if all(record.cached_tokens is None for record in records):
        raise InputError(f"{path}: neither block_hashes nor cached_tokens in any record; expected one of them")
    return True


def _parameters(fit: Fit, draws: FloatArray, drift: float) -> dict[str, Parameter]:
    parameters = {}
    for column in fit.free:
        term = TERMS[column]
        value, low, high = float(fit.parameters[column]), None, None
        if len(draws):
            ends = np.quantile(draws[:, column], INTERVAL)
            low, high = widened(value, float(ends[0]), float(ends[1]), drift)
        parameters[term.name] = Parameter(value=value, unit=term.unit, low=low, high=high)
    return parameters


def _with_notes(
    parameters: Mapping[str, Parameter], unidentified: Sequence[Unidentified], assumed: Priors
) -> dict[str, Parameter]:
    default_names = {TERMS[int(np.argmax(row > 0.0))].name for row in assumed.rows}
    annotated = dict(parameters)
    for item in unidentified:
        note = f"{item.why}; drawn towards {DEFAULTS.get(item.name, 0)}" if item.name in default_names else item.why
        annotated[item.name] = msgspec.structs.replace(annotated[item.name], identified=False, note=note)
    return annotated


def _diagnostics(
    best: Fit, fits: Sequence[Fit], trials: Sequence[Trial], captures: Sequence[Capture]
) -> dict[str, Any]:
    observed, requests = best.observed, best.forecast
    return {
        "requests": int((~requests.censored).sum()),
        "censored": int(requests.censored.sum()),
        "gaps": _gaps(captures),
        "intervals": {"prefill": int(observed.is_prefill.sum()), "decode": int((~observed.is_prefill).sum())},
        "misfits": best.misfits,
        "sessions": len(np.unique(observed.session)),
        "loss": round(best.loss, 6),
        "condition_number": round(best.solution.condition, 1),
        "prefill_relative_scale": round(best.solution.prefill_scale, 6),
        "decode_relative_scale": round(best.solution.decode_scale, 6),
        "variant": best.variant.name,
        "variants": {fit.variant.name: round(fit.loss, 6) for fit in fits},
        "terms": {" + ".join(("default", *trial.extra_terms)): round(trial.loss, 6) for trial in trials},
        "cached_agreement": _mean_agreement(captures),
        "errors": errors_in_sample(requests),
    }


def _mean_agreement(captures: Sequence[Capture]) -> float | None:
    shares = [(capture.agreement, len(capture.records)) for capture in captures if capture.agreement is not None]
    return (
        round(sum(share * count for share, count in shares) / sum(count for _, count in shares), 4) if shares else None
    )
