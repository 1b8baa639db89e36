"""Variants: shapes of engine and sets of terms, which no regression solves for but only compares.

The work in a capture's intervals depends on the assumed scheduling and on the API server's placement; the parameters
of each variant are then a regression's. Variants are compared by their errors on the seen intervals and on the TTFTs of
a run of their own.

A term is judged on captures that it was not solved on: all but one are fitted, and the one left out gives the score.
With a single capture, five parts of its sessions take that role, scored by intervals alone. The term that helps most
comes in, if it helps enough in most folds.
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
"""Of asking when the API server worked: the last two differ by a per cent or so."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A trace ready to be looked at under any variant."""

    records: list[Record]
    arrivals: Arrivals
    cached_tokens: list[int]
    """Per record: as reported; where it is not, as the pool's rules have it."""
    agreement: float | None
    """Share of the reported cached tokens that are the rules' own; None: none were reported beside hashes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape of engine."""

    config: EngineConfig
    placement: FrontendPlacement

    @property
    def name(self) -> str:
        scheduling = "async" if self.config.async_scheduling else "sync"
        return f"{scheduling} scheduling, {self.placement} API server"


@dataclass(frozen=True, slots=True)
class Fit:
    """The parameters of one variant and what they leave over."""

    variant: Variant
    terms: tuple[str, ...]
    parameters: FloatArray
    seen: Observations
    solution: Solution
    misfits: int
    """Requests whose first token comes out in another step than it was seen in."""
    forecast: Requests
    loss: float
    """Mean |log(seen / predicted)| (at most 1 each) of prefills, of decodes and of the forecast's TTFTs, averaged."""

    @property
    def free(self) -> list[int]:
        return columns_of(self.terms)


def columns_of(terms: Sequence[str]) -> list[int]:
    return [column for column, term in enumerate(TERMS) if term.name in terms]


def prepare_capture(records: list[Record], arrivals: Arrivals, config: EngineConfig, path: str) -> Capture:
    """Raises InputError naming ``path`` if the requests went to several engines: no schedule is theirs."""
    if (engines := len({record.upstream for record in records} - {None})) > 1:
        raise InputError(f"{path}: requests of {engines} upstreams; expected a capture of one engine")
    schedule = reconstruct(records, request_columns(arrivals, config.block_size), config)
    ruled = [max(int(request.cached_tokens), 0) for request in schedule.requests]
    agree = [
        record.cached_tokens == own
        for record, own in zip(records, ruled, strict=True)
        if record.cached_tokens is not None and record.block_hashes is not None
    ]
    cached = [
        own if record.cached_tokens is None else record.cached_tokens
        for own, record in zip(ruled, records, strict=True)
    ]
    agreement = round(sum(agree) / len(agree), 4) if agree else None
    return Capture(records, arrivals, cached, agreement)


def factual_columns(capture: Capture, block_size: int) -> tuple[Arrivals, RequestColumns]:
    """Return a capture's requests, each with the blocks that it hit; they have keys of their own if a hit has a key
    unknown."""
    arrivals = capture.arrivals
    hits = np.minimum(np.array(capture.cached_tokens) // block_size, arrivals.full_blocks)
    if (hits > arrivals.hashed_blocks).any():
        arrivals = replace(arrivals, hashed_blocks=hits, hashes=np.arange(1, hits.sum() + 1, dtype=np.uint64))
    return arrivals, request_columns(arrivals, block_size, hits)


def without_eviction(config: EngineConfig) -> EngineConfig:
    """Return an engine of unlimited blocks that takes the requests that ``config`` takes."""
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
    """Raises InputError if no prefill, no decode and no first token is there to compare with a prediction."""
    seen, solution = _look(captures, schedules, variant, terms, assumed)
    requests = forecast(captures, solution.parameters, variant)
    misfits = sum(schedule.misfits for schedule in schedules)
    losses = [*group_losses(seen, solution.parameters), requests.loss]
    if np.isnan(losses).all():
        config = variant.config
        raise InputError(
            "no token of the captures is one that the engine's rules compute: its requests failed, or are beyond "
            f"max_model_len {config.max_model_len} and num_gpu_blocks {config.num_gpu_blocks}; expected captures of "
            "served requests"
        )
    return Fit(variant, terms, solution.parameters, seen, solution, misfits, requests, float(np.nanmean(losses)))


def _look(
    captures: Sequence[Capture],
    schedules: Sequence[Reconstruction],
    variant: Variant,
    terms: tuple[str, ...],
    assumed: Priors,
) -> tuple[Observations, Solution]:
    """Intervals and their solution; repeated on a shared core, where the API server's work depends on its own times."""
    costs: FloatArray = np.zeros(len(TERMS))
    for _ in range(ROUNDS if variant.placement == "shared_core" else 1):
        seen = Observations.join(
            [
                observe(capture.records, schedule, variant.placement, costs.tolist())
                for capture, schedule in zip(captures, schedules, strict=True)
            ]
        )
        solution = solve(seen, columns_of(terms), assumed)
        # A first token that was read late, with the next step's or after it, tells of two steps together only.
        seen = with_late_reads_joined(seen, seen.counts @ solution.parameters)
        solution = solve(seen, columns_of(terms), assumed)
        costs = solution.parameters
    return seen, solution


def forecast(captures: Sequence[Capture], parameters: FloatArray, variant: Variant) -> Requests:
    costs = dict(zip((term.name for term in TERMS), parameters.tolist(), strict=True))
    model = make_model(costs, variant.config, placement=variant.placement)
    predicted_ms: list[float | None] = []
    size, config = variant.config.block_size, without_eviction(variant.config)
    for capture in captures:
        arrivals, columns = factual_columns(capture, size)
        simulation = simulate(arrivals, config, model, columns=columns, cache=FactualCache(size))
        ttft_ms = [request.ttft_ms for request in simulation.requests]
        predicted_ms += [None if np.isnan(one_ms) else one_ms for one_ms in ttft_ms]
    records = [record for capture in captures for record in capture.records]
    cached = [tokens for capture in captures for tokens in capture.cached_tokens]
    return requests_of(records, cached, predicted_ms)


def group_losses(seen: Observations, parameters: FloatArray) -> tuple[float, float]:
    """Mean over prefills and over decodes of min(|log(seen / predicted)|, 1); NaN for a group of none."""
    predicted_ms = np.maximum(seen.counts @ parameters, 1e-6)
    error = np.minimum(np.abs(np.log(seen.seen_ms / predicted_ms)), 1.0)
    prefills, decodes = (
        float(error[group].mean()) if group.any() else float("nan") for group in (seen.is_prefill, ~seen.is_prefill)
    )
    return prefills, decodes


def choose(fits: Sequence[Fit]) -> Fit:
    """The first whose loss is within a hundredth of the least: they come simplest first."""
    least = min(fit.loss for fit in fits)
    return next(fit for fit in fits if fit.loss <= 1.01 * least)


def default_terms(extra: Sequence[str]) -> tuple[str, ...]:
    wanted = {*DEFAULT_TERMS, *extra}
    return tuple(term.name for term in TERMS if term.name in wanted)


FOLDS = 5
"""Parts of a single capture."""
LEAST_GAIN = 0.01
"""A term must lower the loss on what was left out by this share of it."""
TtftLoss = Callable[[int, FloatArray], float]
"""Of a fold's own run with parameters that were solved without it; NaN: it has none."""
CHOICE_ROUNDS = 3
"""Of choosing: what a shared core's API server did when follows from the terms, and these from that."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A set of terms across the folds."""

    extra_terms: tuple[str, ...]
    losses: tuple[float, ...]
    """Per fold: on what was left out, mean |log(seen / predicted)| of prefills, of decodes and of TTFTs, averaged."""

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def with_chosen_terms(
    fit: Fit, captures: Sequence[Capture], schedules: Sequence[Reconstruction]
) -> tuple[Fit, list[Trial]]:
    """The same variant with the terms that help it, and the trials of the last round."""

    def ttft_loss(fold: int, parameters: FloatArray) -> float:
        if len(captures) == 1:  # a part of its sessions does not run by itself
            return float("nan")
        return forecast(captures[fold : fold + 1], parameters, fit.variant).loss

    trials: list[Trial] = []
    for _ in range(CHOICE_ROUNDS if fit.variant.placement == "shared_core" else 1):
        trials = choose_terms(fit.seen, ttft_loss)
        terms = default_terms(trials[-1].extra_terms)
        if terms == fit.terms:
            break
        fit = fit_variant(captures, schedules, fit.variant, terms)
    return fit, trials


def choose_terms(seen: Observations, ttft_loss: TtftLoss) -> list[Trial]:
    """Return every set that was tried, the chosen one last."""
    folds = seen.capture if seen.capture.max(initial=0) > 0 else seen.session % FOLDS
    best = _try(seen, folds, (), ttft_loss)
    trials = [best]
    while True:
        names = [
            name for name in EXTRA_TERMS if name not in best.extra_terms and seen.counts[:, columns_of((name,))].any()
        ]
        more = [
            _try(seen, folds, (*best.extra_terms, name), ttft_loss)
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


def _try(seen: Observations, folds: IntArray, extra_terms: Sequence[str], ttft_loss: TtftLoss) -> Trial:
    free = columns_of(default_terms(extra_terms))
    losses = []
    for fold in range(int(folds.max(initial=0)) + 1):
        kept, left = seen.select(folds != fold), seen.select(folds == fold)
        if len(kept.seen_ms) and len(left.seen_ms):
            parameters = solve(kept, free).parameters
            losses.append(float(np.nanmean([*group_losses(left, parameters), ttft_loss(fold, parameters)])))
    return Trial(tuple(extra_terms), tuple(losses) or (float("inf"),))
