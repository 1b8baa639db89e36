"""The fit's loop: which steps a request went through depends on how long steps take, and the other way round.

Simulate with the current parameters, count what each interval is made of, solve for the parameters, go there, repeat.
The simulation keeps to what was seen: a step that samples a token ends when that token was read. Left to itself, it
would drift from the capture wherever requests queue, each error making the next, and under load the loop would chase
its own tail. The model is left with what no token tells: chunks in the middle of prompts, and when requests enter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sim.config import EngineConfig
from sim.engine import Engine
from sim.factual import factual_pool
from sim.features import DEFAULT_STEP_TERMS, FRONTEND_TERMS, STEP_TERMS, TERMS
from sim.latency import FrontendModel, FrontendPlacement, StepModel
from sim.model import make_model
from sim.observations import Observations, observe, seen_tokens
from sim.regression import Solution, solve
from sim.timeline import Floats
from sim.workload import Arrival
from tracefile.schema import Record

CachedSource = Literal["factual", "simulated"]

MOST_ITERATIONS = 15
FULL_STRIDES = 5
_CONVERGED = 1e-3
"""Root mean square change of the predictions, relative, that counts as none."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A trace ready to be simulated again and again."""

    records: list[Record]
    """Those that were planned; parallel to ``arrivals``."""
    arrivals: list[Arrival]
    cached_tokens: list[int]
    """Per record: as reported; where it is not, as a simulated pool has it."""
    factual: bool = True
    """Each request hits its ``cached_tokens``. False: what the simulated pool holds at the time."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape of engine to try: what cannot be solved for, only compared."""

    config: EngineConfig
    placement: FrontendPlacement
    step_terms: tuple[str, ...] = DEFAULT_STEP_TERMS

    @property
    def name(self) -> str:
        """For people."""
        extra = [name for name in self.step_terms if name not in DEFAULT_STEP_TERMS]
        scheduling = "async" if self.config.async_scheduling else "sync"
        return " ".join([f"{scheduling} scheduling, {self.placement} front end", *(f"+ {name}" for name in extra)])

    @property
    def free(self) -> list[int]:
        """Columns of the terms that are solved for."""
        names = {*self.step_terms, *(term.name for term in FRONTEND_TERMS)}
        return [column for column, term in enumerate(TERMS) if term.name in names]


@dataclass(frozen=True, slots=True)
class Fit:
    """The fixed point of one variant, or, if there was none, the iterate that predicts best."""

    variant: Variant
    parameters: Floats
    """In the order of ``TERMS``."""
    seen: Observations
    """What the captures' intervals are made of, in a run that keeps to the token times seen."""
    forecast: Observations
    """The same, in a run of its own with ``parameters``: what ``sim run`` would have predicted."""
    solution: Solution
    """Of the regression on ``seen``."""
    loss: float
    """Mean |log(seen / predicted)| of TTFTs and of gaps, at most 1 each, averaged."""
    losses: list[float]
    """Per iteration."""
    converged: bool
    gap: float
    """How far the regression would still move the predictions (root mean square, relative). Large though converged:
    steps and parameters chase each other, and this is the middle of where they went."""


def simulate_captures(
    captures: Sequence[Capture], parameters: Floats, variant: Variant, *, forced: bool
) -> Observations:
    """Each capture once, at its recorded arrivals, without noise.

    ``forced``: steps end when their tokens were seen.
    """
    step, frontend = split(parameters, variant.placement)
    model = make_model(step, frontend, variant.config)
    parts = []
    for capture in captures:
        arrivals, pool = capture.arrivals, None
        if capture.factual:
            arrivals, pool = factual_pool(arrivals, variant.config.block_size, capture.cached_tokens)
        seen_ms = [seen_tokens(record) for record in capture.records] if forced else None
        simulation = Engine(arrivals, variant.config, model, pool=pool, seen_ms=seen_ms).run()
        parts.append(observe(capture.records, simulation, placement=variant.placement))
    return Observations.join(parts, [len(capture.records) for capture in captures])


def fit_variant(
    captures: Sequence[Capture], variant: Variant, start: Floats, on_iteration: Callable[[], object]
) -> Fit:
    """Iterate from ``start`` to a fixed point, in shorter and shorter strides once the first few have come near it.

    An arrival next to a step's end falls on either side of it from one iteration to the next, so that full strides may
    wander for ever; strides of 1/2, 1/3, … go to the middle of where they wander.
    """
    parameters = start
    losses: list[float] = []
    best: Fit | None = None
    converged = False
    while len(losses) < MOST_ITERATIONS and not converged:
        seen = simulate_captures(captures, parameters, variant, forced=True)
        solution = solve(seen, variant.free, parameters)
        losses.append(relative_loss(seen, parameters))
        on_iteration()
        stride = 1.0 / max(1, len(losses) - FULL_STRIDES + 1)
        gap = prediction_change(seen, parameters, solution.parameters)
        converged = stride * gap < _CONVERGED
        if best is None or converged or losses[-1] <= best.loss:
            best = Fit(variant, parameters, seen, seen, solution, losses[-1], [], converged, gap)
        parameters = parameters + stride * (solution.parameters - parameters)
    assert best is not None
    forecast = simulate_captures(captures, best.parameters, variant, forced=False)
    return replace(best, losses=losses, forecast=forecast)


def split(parameters: Floats, placement: FrontendPlacement) -> tuple[StepModel, FrontendModel]:
    """The two models of a vector in the order of ``TERMS``."""
    values = {term.name: float(value) for term, value in zip(TERMS, parameters, strict=True)}
    step = StepModel(**{term.name: values[term.name] for term in STEP_TERMS})
    return step, FrontendModel(placement=placement, **{term.name: values[term.name] for term in FRONTEND_TERMS})


def relative_loss(seen: Observations, parameters: Floats) -> float:
    """Mean over TTFTs and over gaps of min(|log(seen / predicted)|, 1), averaged: what a forecast would be off by."""
    predicted = np.maximum(seen.counts @ parameters, 1e-6)
    error = np.minimum(np.abs(np.log(np.maximum(seen.seen_ms, 1e-6) / predicted)), 1.0)
    ttft = seen.is_ttft & ~seen.censored
    groups = [error[group].mean() for group in (ttft, ~seen.is_ttft) if group.any()]
    return float(np.mean(groups))


def prediction_change(seen: Observations, before: Floats, after: Floats) -> float:
    """Root mean square relative change of the predictions from ``before`` to ``after``."""
    first, second = seen.counts @ before, seen.counts @ after
    return float(np.sqrt(np.mean(((second - first) / np.maximum(first, 1e-6)) ** 2)))


def first_guess(captures: Sequence[Capture]) -> Floats:
    """A start: the shortest gaps are a step's constant, and TTFT grows with uncached tokens."""
    gaps = [gap for capture in captures for record in capture.records for gap in record.itl_ms]
    known = [
        (arrival.prompt_tokens - cached, record.ttft_ms)
        for capture in captures
        for arrival, record, cached in zip(capture.arrivals, capture.records, capture.cached_tokens, strict=True)
        if record.ttft_ms is not None
    ]
    step_ms = float(np.quantile(gaps, 0.2)) if gaps else 10.0
    slopes = [max(ttft_ms - step_ms, 0.0) / max(tokens, 1) for tokens, ttft_ms in known if tokens >= 256]
    guess = {
        "t0_ms": 0.7 * step_ms,
        "per_decode_ms": 0.2 * step_ms,
        "per_prefill_token_ms": float(np.median(slopes)) if slopes else 0.01 * step_ms,
        "f0_ms": 0.5 * step_ms,
    }
    return np.array([guess.get(term.name, 0.0) for term in TERMS])


def prepare_capture(
    records: list[Record], arrivals: list[Arrival], variant: Variant, start: Floats, source: CachedSource
) -> Capture:
    """Settle each record's cached tokens: as reported, or by a pool simulated once from a cold start."""
    simulated = pool_hits(Capture(records, arrivals, [], factual=False), start, variant)
    reported = [record.cached_tokens if source == "factual" else None for record in records]
    cached = [own if said is None else said for own, said in zip(simulated, reported, strict=True)]
    return Capture(records, arrivals, cached, factual=source == "factual")


def pool_hits(capture: Capture, parameters: Floats, variant: Variant) -> list[int]:
    """Cached tokens per record as a pool has them that was empty when the capture began."""
    step, frontend = split(parameters, variant.placement)
    model = make_model(step, frontend, variant.config)
    seen_ms = [seen_tokens(record) for record in capture.records]
    simulation = Engine(capture.arrivals, variant.config, model, seen_ms=seen_ms).run()
    return [0 if flight.request is None else flight.request.cached_tokens or 0 for flight in simulation.flights]
