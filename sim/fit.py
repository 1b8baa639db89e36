"""``sim fit``: learn how long an engine's steps take, from captured traces alone."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sim.baselines import baseline_errors
from sim.features import DEFAULT_STEP_TERMS, EXTRA_STEP_TERMS, TERMS
from sim.fitreport import describe_fit, describe_misfit
from sim.fixedpoint import (
    MOST_ITERATIONS,
    CachedSource,
    Capture,
    Fit,
    Variant,
    first_guess,
    fit_variant,
    pool_hits,
    prepare_capture,
)
from sim.flags import add_engine_flags, engine_overrides
from sim.identification import Unidentified, find_unidentified, require_enough
from sim.latency import FrontendPlacement
from sim.model import FitTrace, Model, Parameter, save_model
from sim.regression import bootstrap
from sim.residuals import Requests, cohort_errors, estimate_noise, requests_of
from sim.settings import Settings, model_name, settle
from sim.timeline import Floats
from sim.workload import plan_arrivals
from tracefile import InputError, Meta, Record, load_trace, trace_digest
from tracefile.progress import counted

INTERVAL = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class FitConfig:
    """What ``sim fit`` was asked for."""

    traces: tuple[Path, ...]
    output: Path
    overrides: dict[str, Any]
    """Engine settings that the traces do not tell, or tell wrongly."""
    bootstrap: int = 400
    seed: int = 0
    cached: CachedSource = "factual"
    frontend: FrontendPlacement | None = None
    """None: try all, keep the best."""
    extra_terms: tuple[str, ...] = ()
    residuals: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sim fit``."""
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="captures of one engine")
    parser.add_argument("-o", "--output", type=Path, required=True, help="model.json to write")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples of the sessions (default 400; 0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0)")
    parser.add_argument(
        "--cached",
        choices=get_args(CachedSource),
        default="factual",
        help="cached tokens as the traces report them (default), or as a simulated pool has them",
    )
    parser.add_argument(
        "--frontend",
        choices=[*get_args(FrontendPlacement), "auto"],
        default="auto",
        help="how the HTTP server's work meets the engine's (default auto: the simplest that predicts best)",
    )
    parser.add_argument(
        "--term", action="append", choices=EXTRA_STEP_TERMS, default=[], help="a step term beyond the default five"
    )
    parser.add_argument("--residuals", action="store_true", help="print where the predictions are off")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fit, write model.json, say what was learnt."""
    config = FitConfig(
        traces=tuple(arguments.traces),
        output=arguments.output,
        overrides=engine_overrides(arguments),
        bootstrap=arguments.bootstrap,
        seed=arguments.seed,
        cached=arguments.cached,
        frontend=None if arguments.frontend == "auto" else arguments.frontend,
        extra_terms=tuple(dict.fromkeys(arguments.term)),
        residuals=arguments.residuals,
    )
    if config.bootstrap < 0:
        raise InputError(f"--bootstrap: {config.bootstrap}; expected 0 or more")
    fitted = fit_traces(config)
    save_model(fitted.model, config.output)
    print(describe_fit(fitted.model, fitted.unidentified))
    if config.residuals:
        print(describe_misfit(fitted.requests))
    print(f"{config.output}: written")
    return 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model and what its report needs."""

    model: Model
    unidentified: list[Unidentified]
    requests: Requests


def fit_traces(config: FitConfig) -> Fitted:
    """Read the traces, iterate every variant to its fixed point, keep the best, and weigh what it is worth."""
    if len(set(config.traces)) < len(config.traces):
        raise InputError(f"{config.traces[0]}: a trace is given twice; expected each once")
    loaded = {str(path): load_trace(path) for path in config.traces}
    settings = settle({path: meta for path, (meta, _) in loaded.items()}, config.overrides)
    if settings.assumed:
        told = ", ".join(f"{name} = {value}" for name, value in settings.assumed.items())
        print(f"sim fit: assumed, because no trace and no flag says: {told}", file=sys.stderr)
    variants = _variants(config, settings)
    captures, start = _prepare(loaded, variants[0], config.cached)
    iterations = counted(range(MOST_ITERATIONS * len(variants)), "iterations")
    fits = [fit_variant(captures, variant, start, lambda: next(iterations, None)) for variant in variants]
    best = choose(fits)
    requests = requests_of(captures, best.forecast, best.parameters)
    draws = bootstrap(best.seen, best.solution.weights, best.variant.free, config.bootstrap, config.seed)
    unidentified = find_unidentified(best.seen, best.variant.free, best.parameters, draws)
    model = Model(
        parameters=_parameters(best, draws, unidentified),
        engine=best.variant.config,
        frontend_placement=best.variant.placement,
        noise=estimate_noise(requests_of(captures, best.seen, best.parameters), best.seen, best.parameters),
        model_name=model_name([meta for meta, _ in loaded.values()]),
        fitted_on=[
            FitTrace(digest=trace_digest(path), name=path.name, requests=len(capture.records))
            for path, capture in zip(config.traces, captures, strict=True)
        ],
        diagnostics=_diagnostics(
            best,
            fits,
            captures=captures,
            requests=requests,
            settings=settings,
            config=config,
            unidentified=unidentified,
        ),
        baselines=baseline_errors(requests),
    )
    return Fitted(model, unidentified, requests)


def choose(fits: Sequence[Fit]) -> Fit:
    """The first whose loss is within a hundredth of the least: they come simplest first."""
    least = min(fit.loss for fit in fits)
    return next(fit for fit in fits if fit.loss <= 1.01 * least)


def _variants(config: FitConfig, settings: Settings) -> list[Variant]:
    """Every shape of engine that neither the traces nor the flags rule out."""
    placements = get_args(FrontendPlacement) if config.frontend is None else (config.frontend,)
    scheduling = (settings.config.async_scheduling,) if settings.scheduling_known else (False, True)
    terms = (*DEFAULT_STEP_TERMS, *config.extra_terms)
    return [
        Variant(replace(settings.config, async_scheduling=ahead), placement, terms)
        for ahead in scheduling
        for placement in placements
    ]


def _prepare(
    loaded: dict[str, tuple[Meta, list[Record]]], variant: Variant, cached: CachedSource
) -> tuple[list[Capture], Floats]:
    """The captures, ready to simulate, and where to start."""
    planned = {
        path: plan_arrivals(
            meta,
            records,
            variant.config.block_size,
            path=path,
            cold_prompts=cached == "factual" and _hits_without_hashes(path, records),
        )
        for path, (meta, records) in loaded.items()
    }
    as_reported = [
        Capture(records, planned[path], [record.cached_tokens or 0 for record in records])
        for path, (_, records) in loaded.items()
    ]
    start = first_guess(as_reported)
    captures = [prepare_capture(capture.records, capture.arrivals, variant, start, cached) for capture in as_reported]
    usable = [
        arrival.prompt_tokens - tokens
        for capture in captures
        for arrival, record, tokens in zip(capture.arrivals, capture.records, capture.cached_tokens, strict=True)
        if arrival.fate == "runs" and record.ttft_ms is not None
    ]
    gaps = sum(len(record.itl_ms) for capture in captures for record in capture.records)
    require_enough(np.array(usable), gaps)
    return captures, start


def _hits_without_hashes(path: str, records: Sequence[Record]) -> bool:
    """Whether a trace has no block hashes but says what was cached, which is enough. Raises InputError if neither."""
    if any(record.block_hashes is not None for record in records):
        return False
    if all(record.cached_tokens is None for record in records):
        raise InputError(f"{path}: neither block_hashes nor cached_tokens in any record; expected one of them")
    return True


def _parameters(fit: Fit, draws: Floats, unidentified: Sequence[Unidentified]) -> dict[str, Parameter]:
    why = {one.name: one.why for one in unidentified}
    parameters = {}
    for column in fit.variant.free:
        term = TERMS[column]
        low, high = np.quantile(draws[:, column], INTERVAL) if len(draws) else (None, None)
        parameters[term.name] = Parameter(
            value=float(fit.parameters[column]),
            unit=term.unit,
            low=None if low is None else float(low),
            high=None if high is None else float(high),
            identified=term.name not in why,
            note=why.get(term.name),
        )
    return parameters


def _diagnostics(
    best: Fit,
    fits: Sequence[Fit],
    *,
    captures: Sequence[Capture],
    requests: Requests,
    settings: Settings,
    config: FitConfig,
    unidentified: Sequence[Unidentified],
) -> dict[str, Any]:
    seen = best.seen
    return {
        "requests": int((~requests.censored).sum()),
        "censored": int(requests.censored.sum()),
        "gaps": int((~seen.is_ttft).sum()),
        "sessions": len(np.unique(seen.session)),
        "iterations": len(best.losses),
        "converged": best.converged,
        "gap": round(best.gap, 6),
        "loss": round(best.loss, 6),
        "losses": [round(loss, 6) for loss in best.losses],
        "condition_number": round(best.solution.condition, 1),
        "ttft_relative_scale": round(best.solution.ttft_scale, 6),
        "itl_relative_scale": round(best.solution.itl_scale, 6),
        "variant": best.variant.name,
        "variants": {fit.variant.name: round(fit.loss, 6) for fit in fits},
        "cached_tokens_from": config.cached,
        "cached_agreement": _cached_agreement(captures, best),
        "assumed_settings": settings.assumed,
        "bootstrap": {"rounds": config.bootstrap, "seed": config.seed, "by": "session", "level": 0.95},
        "errors": [asdict(errors) for errors in cohort_errors(requests)],
        "unidentified": [asdict(one) for one in unidentified],
    }


def _cached_agreement(captures: Sequence[Capture], best: Fit) -> float | None:
    """Share of the requests that report cached tokens and hashes for which a pool simulated from a cold
    start has as many."""
    pairs = [
        (record.cached_tokens, simulated)
        for capture in captures
        for record, simulated in zip(capture.records, pool_hits(capture, best.parameters, best.variant), strict=True)
        if record.cached_tokens is not None and record.block_hashes is not None
    ]
    return round(sum(one == other for one, other in pairs) / len(pairs), 4) if pairs else None
