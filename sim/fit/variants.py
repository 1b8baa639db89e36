"""Fit of one engine variant, and choice of variant and terms by out-of-sample latency errors.

The work in a capture's intervals depends on the scheduling and on the API server's placement; the parameters of each
variant are then a regression's. Variants are compared by their errors on measured intervals and on the TTFTs of a
simulated run.

A term is evaluated on captures outside its fit: all but one capture are fitted, and the held-out capture gives the
loss. A single capture is split into five parts by session, scored by intervals alone. The term with the largest gain is
added if the gain suffices in most folds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.engine.columns import RequestColumns
from sim.engine.simulation import request_columns, simulate
from sim.fit.capturedschedule import reconstruct
from sim.fit.observations import Observations, observe
from sim.fit.priors import NO_ASSUMPTIONS, Priors
from sim.fit.regression import Solution, solve, with_late_reads_joined
from sim.fit.residuals import Requests, requests_of
from sim.fit.schedule import Reconstruction
from sim.latency.modelfile import make_model
from sim.latency.terms import DEFAULT_TERMS, EXTRA_TERMS, TERMS, FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import FactualCache
from sim.workload.arrivals import Arrivals
from tracefile.commandline.progress import counted
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

ROUNDS = 4
"""Iterations of the API server's times: the last two differ by about 1 %."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Trace prepared for fits of any variant."""

    records: list[Record]
    arrivals: Arrivals
    cached_tokens: list[int]
    """Per record: as reported, else by the block pool's rules."""
    agreement: float | None
    """Share of requests whose reported cached tokens equal the block pool's; None: none reported with hashes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Engine variant: scheduling and API server placement."""

    config: EngineConfig
    placement: FrontendPlacement

    @property
    def name(self) -> str:
        scheduling = "async" if self.config.async_scheduling else "sync"
        return f"{scheduling} scheduling, {self.placement} API server"


@dataclass(frozen=True, slots=True)
class Fit:
    """Parameters of one variant, with residuals of intervals and TTFTs."""

    variant: Variant
    terms: tuple[str, ...]
    parameters: FloatArray
    observed: Observations
    solution: Solution
    misfits: int
    """Requests whose first token falls into another scheduler step than in the capture."""
    forecast: Requests
    loss: float
    """Mean |log(measured / predicted)| (at most 1 each) of prefills, decodes and simulated TTFTs, averaged."""

    @property
    def free(self) -> list[int]:
        return columns_of(self.terms)


def columns_of(terms: Sequence[str]) -> list[int]:
    return [column for column, term in enumerate(TERMS) if term.name in terms]


def prepare_capture(records: list[Record], arrivals: Arrivals, config: EngineConfig, path: str) -> Capture:
    """Return a capture with its cached tokens. Raises InputError naming ``path`` for several engines: no schedule."""
    if (engines := len({record.upstream for record in records} - {None})) > 1:
        raise InputError(f"{path}: requests of {engines} upstreams; expected a capture of one engine")
    schedule = reconstruct(records, request_columns(arrivals, config.block_size), config)
    ruled = [max(int(request.cached_tokens), 0) for request in schedule.requests]
    agree = [
        record.cached_tokens == computed
        for record, computed in zip(records, ruled, strict=True)
        if record.cached_tokens is not None and record.block_hashes is not None
    ]
    cached = [
        computed if record.cached_tokens is None else record.cached_tokens
        for computed, record in zip(ruled, records, strict=True)
    ]
    agreement = round(sum(agree) / len(agree), 4) if agree else None
    return Capture(records, arrivals, cached, agreement)


def factual_columns(capture: Capture, block_size: int) -> tuple[Arrivals, RequestColumns]:
    """Return requests with their reported prefix hits as hit blocks; own keys if a hit has an unknown key."""
    arrivals = capture.arrivals
    hits = np.minimum(np.array(capture.cached_tokens) // block_size, arrivals.full_blocks)
    if (hits > arrivals.hashed_blocks).any():
        arrivals = replace(arrivals, hashed_blocks=hits, hashes=np.arange(1, hits.sum() + 1, dtype=np.uint64))
    return arrivals, request_columns(arrivals, block_size, hits)


def without_eviction(config: EngineConfig) -> EngineConfig:
    """Return an engine without eviction that accepts the requests that ``config`` accepts."""
    longest = min(config.longest_request, config.usable_blocks * config.block_size + 1)
    return replace(config, max_model_len=longest, enable_prefix_caching=True)


def schedule_of(capture: Capture, config: EngineConfig) -> Reconstruction:
    size = config.block_size
    columns = factual_columns(capture, size)[1]
    return reconstruct(capture.records, columns, without_eviction(config), lambda: FactualCache(size))


def fit_variant(
    captures: Sequence[Capture],
    schedules: Sequence[Reconstruction],
    variant: Variant,
    terms: tuple[str, ...],
    assumed: Priors = NO_ASSUMPTIONS,
) -> Fit:
    """Fit one variant. Raises InputError without any prefill, decode or first token to compare."""
    observed, solution = _look(captures, schedules, variant, terms, assumed)
    requests = forecast(captures, solution.parameters, variant)
    misfits = sum(schedule.misfits for schedule in schedules)
    losses = [*group_losses(observed, solution.parameters), requests.loss]
    if np.isnan(losses).all():
        config = variant.config
        raise InputError(
            "no token of the captures is one that the scheduler computes: the requests failed, or are beyond "
            f"max_model_len {config.max_model_len} and num_gpu_blocks {config.num_gpu_blocks}; expected captures of "
            "served requests"
        )
    return Fit(variant, terms, solution.parameters, observed, solution, misfits, requests, float(np.nanmean(losses)))


def _look(
    captures: Sequence[Capture],
    schedules: Sequence[Reconstruction],
    variant: Variant,
    terms: tuple[str, ...],
    assumed: Priors,
) -> tuple[Observations, Solution]:
    """Return intervals and solution; iterated on a shared core, where the API server's work depends on its times."""
    costs: FloatArray = np.zeros(len(TERMS))
    for _ in range(ROUNDS if variant.placement == "shared_core" else 1):
        observed = Observations.join(
            [
                observe(capture.records, schedule, variant.placement, costs.tolist())
                for capture, schedule in zip(captures, schedules, strict=True)
            ]
        )
        solution = solve(observed, columns_of(terms), assumed)
        # A first token read late, with the next step's tokens or after, measures two steps together.
        observed = with_late_reads_joined(observed, observed.counts @ solution.parameters)
        solution = solve(observed, columns_of(terms), assumed)
        costs = solution.parameters
    return observed, solution


def forecast(captures: Sequence[Capture], parameters: FloatArray, variant: Variant) -> Requests:
    costs = dict(zip((term.name for term in TERMS), parameters.tolist(), strict=True))
    model = make_model(costs, variant.config, placement=variant.placement)
    predicted_ms: list[float | None] = []
    size, config = variant.config.block_size, without_eviction(variant.config)
    for capture in captures:
        arrivals, columns = factual_columns(capture, size)
        simulation = simulate(arrivals, config, model, columns=columns, cache=FactualCache(size))
        ttft_ms = [request.ttft_ms for request in simulation.requests]
        predicted_ms += [None if np.isnan(value_ms) else value_ms for value_ms in ttft_ms]
    records = [record for capture in captures for record in capture.records]
    cached = [tokens for capture in captures for tokens in capture.cached_tokens]
    return requests_of(records, cached, predicted_ms)


def group_losses(observed: Observations, parameters: FloatArray) -> tuple[float, float]:
    """Return the mean of min(|log(measured / predicted)|, 1) of prefills and of decodes; NaN for an empty group."""
    predicted_ms = np.maximum(observed.counts @ parameters, 1e-6)
    error = np.minimum(np.abs(np.log(observed.measured_ms / predicted_ms)), 1.0)
    prefills, decodes = (
        float(error[group].mean()) if group.any() else float("nan")
        for group in (observed.is_prefill, ~observed.is_prefill)
    )
    return prefills, decodes


def choose(fits: Sequence[Fit]) -> Fit:
    """Return the first (simplest) variant whose latency loss is within 1 % of the least."""
    least = min(fit.loss for fit in fits)
    return next(fit for fit in fits if fit.loss <= 1.01 * least)


def default_terms(extra: Sequence[str]) -> tuple[str, ...]:
    names = {*DEFAULT_TERMS, *extra}
    return tuple(term.name for term in TERMS if term.name in names)


FOLDS = 5
"""Parts of a single capture."""
LEAST_GAIN = 0.01
"""Smallest relative gain in held-out loss that adds a term."""
TtftLoss = Callable[[int, FloatArray], float]
"""TTFT loss of a held-out fold's simulated run; NaN: a fold of sessions has none."""
CHOICE_ROUNDS = 3
"""Iterations of the choice: API server times on a shared core depend on the terms, and the reverse."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Loss of a set of terms in each fold."""

    extra_terms: tuple[str, ...]
    losses: tuple[float, ...]
    """Per held-out fold: mean |log(measured / predicted)| of prefills, decodes and TTFTs, averaged."""

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def with_chosen_terms(
    fit: Fit, captures: Sequence[Capture], schedules: Sequence[Reconstruction]
) -> tuple[Fit, list[Trial]]:
    """Return the variant with the terms that lower the latency loss, and the trials of the last round."""

    def ttft_loss(fold: int, parameters: FloatArray) -> float:
        if len(captures) == 1:  # a fold of sessions is no complete load
            return float("nan")
        return forecast(captures[fold : fold + 1], parameters, fit.variant).loss

    trials: list[Trial] = []
    for _ in range(CHOICE_ROUNDS if fit.variant.placement == "shared_core" else 1):
        trials = choose_terms(fit.observed, ttft_loss)
        terms = default_terms(trials[-1].extra_terms)
        if terms == fit.terms:
            break
        fit = fit_variant(captures, schedules, fit.variant, terms)
    return fit, trials


def choose_terms(observed: Observations, ttft_loss: TtftLoss) -> list[Trial]:
    folds = observed.capture if observed.capture.max(initial=0) > 0 else observed.session % FOLDS
    best = _try(observed, folds, (), ttft_loss)
    trials = [best]
    while True:
        names = [
            name
            for name in EXTRA_TERMS
            if name not in best.extra_terms and observed.counts[:, columns_of((name,))].any()
        ]
        more = [
            _try(observed, folds, (*best.extra_terms, name), ttft_loss)
            for name in counted(names, "fit, further terms tried")
        ]
        trials += more
        better = min(more, key=lambda trial: trial.loss, default=best)
        if not _is_better(better, best):
            break
        best = better
    return [*(trial for trial in trials if trial is not best), best]


def _is_better(trial: Trial, than: Trial) -> bool:
    gains = np.array(than.losses) - np.array(trial.losses)
    return trial.loss <= (1.0 - LEAST_GAIN) * than.loss and bool((gains > 0.0).sum() * 2 > len(gains))


def _try(observed: Observations, folds: IntArray, extra_terms: Sequence[str], ttft_loss: TtftLoss) -> Trial:
    free = columns_of(default_terms(extra_terms))
    losses = []
    for fold in range(int(folds.max(initial=0)) + 1):
        train, test = observed.select(folds != fold), observed.select(folds == fold)
        if len(train.measured_ms) and len(test.measured_ms):
            parameters = solve(train, free).parameters
            losses.append(float(np.nanmean([*group_losses(test, parameters), ttft_loss(fold, parameters)])))
    return Trial(tuple(extra_terms), tuple(losses) or (float("inf"),))
