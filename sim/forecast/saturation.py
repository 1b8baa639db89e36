"""Utilization of an engine: step time that a load needs over the step time that the engine has.

A scheduler step costs a constant, plus work per token and request in the batch. Capacity is measured with full batches:
all requests queued from the start. Warnings name conditions beyond the fitted captures.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from measure.cache.vectors import array_of
from sim.engine.deployment import Deployment
from sim.engine.loop import Engine
from sim.engine.simulatedrequest import SimulatedRequest
from sim.engine.simulation import rows_of, simulate
from sim.latency.modelfile import Model, Parameter
from sim.latency.stepcost import DECODES, KV_TOKENS, NUM_ROW_TERMS, REPEATED_KV_TOKENS
from sim.latency.terms import STEP_TERMS, TERMS
from sim.vllm.config import EngineConfig
from sim.vllm.request import NOT_ADMITTED
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.records.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PointRun:
    """Noise-free run with the counts of each scheduler step."""

    counts: FloatArray
    """Counts by step and term: a row's terms, in the order of ``TERMS``."""
    costs: FloatArray
    prompt_tokens: IntArray
    """Prompt and cached tokens of admitted requests."""
    cached_tokens: IntArray
    starts_ms: FloatArray
    """Start and end of each step."""
    ends_ms: FloatArray
    last_admitted_ms: float
    """Minus infinity: no admission."""


def run_point(arrivals: Arrivals, config: EngineConfig, model: Model, deployment: Deployment | None = None) -> PointRun:
    run = simulate(arrivals, config, model, deployment=deployment, keeps_rows=True)
    return point_run(run.engine, run.requests, model)


def point_run(engine: Engine, requests: Iterable[SimulatedRequest], model: Model) -> PointRun:
    admitted = [request for request in requests if request.cached_tokens != NOT_ADMITTED]
    return PointRun(
        rows_of(engine),
        np.array(model.costs[:NUM_ROW_TERMS]),
        np.array([request.prompt_tokens for request in admitted], np.int64),
        np.array([request.cached_tokens for request in admitted], np.int64),
        array_of(engine.starts_ms, np.float64),
        array_of(engine.ends_ms, np.float64),
        max((request.admitted_ms for request in admitted), default=-np.inf),
    )


def utilization_of(
    run: PointRun, arrivals: Arrivals, config: EngineConfig, model: Model, local: Arrivals | None = None
) -> float:
    """Return work per second that ``arrivals``, simulated in ``run``, need, over the engine's capacity.

    From 1 on the engine falls behind without end. NaN: fewer than two independent arrivals. ``local``: the requests of
    this engine; None: all.
    """
    roots_ms = arrivals.arrival_ms[(arrivals.parents == NOBODY) & arrivals.runs]
    span_ms = float(np.ptp(roots_ms)) if len(roots_ms) > 1 else 0.0
    # n arrivals have n − 1 gaps: the work of n − 1 requests comes in the span.
    per_ms = (1.0 - 1.0 / len(roots_ms)) / span_ms if span_ms > 0.0 else np.nan
    return _work_ms(run.counts, run) * per_ms / _capacity(arrivals if local is None else local, config, model)


def _work_ms(counts: FloatArray, run: PointRun) -> float:
    """Return prefill and decode work in ms, without the constant cost of steps."""
    work = np.array([term.work != "step" for term in TERMS[: len(run.costs)]])
    return float((counts * run.costs)[:, work].sum())


def _capacity(arrivals: Arrivals, config: EngineConfig, model: Model) -> float:
    """Return work per second until the last admission, with all requests queued at the start: full batches."""
    run = run_point(_at_once(arrivals), config, model)
    ends_ms = run.ends_ms
    until = int(np.searchsorted(ends_ms, run.last_admitted_ms, side="right"))
    until = until or len(ends_ms)  # all fit into the first step
    if not until:
        return np.nan
    work_ms = _work_ms(run.counts[:until], run)
    span_ms = float(ends_ms[until - 1] - run.starts_ms[0])
    # Steps far shorter than their distance from time 0 have no span.
    return work_ms / span_ms if work_ms and span_ms else 1.0


def _at_once(arrivals: Arrivals) -> Arrivals:
    """Queue all requests at time 0 in arrival order, without parents and aborts, for full batches."""
    order = np.argsort(arrivals.arrival_ms, kind="stable")
    queued, nothing = arrivals.select(order), np.full(len(order), np.nan)
    generated = np.maximum(arrivals.batch.numbers("output_tokens")[queued.rows], 1)
    return replace(
        queued,
        numbers=np.arange(len(order)),
        arrival_ms=np.zeros(len(order)),
        parents=np.full(len(order), NOBODY),
        think_ms=nothing,
        abort_after_ms=nothing,
        output_tokens=np.minimum(queued.output_tokens, generated),
    )


MATTERS = 0.05
"""Share of the step time from which an unidentified parameter gets a warning."""
FARTHER = 1.25
"""Ratio to the fitted extent from which a load is out of range."""
BEYOND_LOG_SD = 0.2
"""Standard deviation of log(speed) for each doubling beyond the captures. With 32 outputs at once instead of the 16
fitted, a real engine was 25 % faster than its forecast at the median."""
_EXTENTS_OF_FIT = {
    "answers_at_once": "outputs at once",
    "deepest_answer": "tokens behind the outputs",
    "longest_cold": "uncached tokens in a prompt",
    "longest_warm": "tokens in a mostly cached prompt",
}
_NEARLY_ALL = 0.98


def _extents(run: PointRun) -> dict[str, float]:
    decoding = run.counts[:, DECODES]
    depth = run.counts[:, KV_TOKENS] + run.counts[:, REPEATED_KV_TOKENS]
    prompts, uncached = run.prompt_tokens, run.prompt_tokens - run.cached_tokens
    extents = {
        "answers_at_once": decoding[decoding > 0.0],
        "deepest_answer": depth[decoding > 0.0] / decoding[decoding > 0.0],
        "longest_cold": uncached,
        "longest_warm": prompts[uncached < prompts / 2],
    }
    return {name: float(np.quantile(values, _NEARLY_ALL)) if len(values) else 0.0 for name, values in extents.items()}


def _beyond(run: PointRun, model: Model) -> dict[str, tuple[float, float]]:
    """Return extents of ``run`` beyond the fitted captures, with the fitted extents (tokens, batch size)."""
    covered, reached = model.diagnostics.get("coverage") or {}, _extents(run)
    fitted = {name: float(covered.get(name) or 0.0) for name in _EXTENTS_OF_FIT}
    return {name: (reached[name], most) for name, most in fitted.items() if most and reached[name] > FARTHER * most}


def beyond_fit(run: PointRun, model: Model) -> Iterator[str]:
    """Yield the token and batch extents of ``run`` beyond the fitted captures, in words."""
    for name, (reached, fitted) in _beyond(run, model).items():
        yield f"{reached:,.0f} {_EXTENTS_OF_FIT[name]}, fitted up to {fitted:,.0f}"


def beyond_log_sd(run: PointRun, model: Model) -> float:
    """Return the extra standard deviation of log(speed) of a latency forecast beyond the fit: largest extent."""
    ratios = [reached / fitted for reached, fitted in _beyond(run, model).values()]
    return BEYOND_LOG_SD * float(np.log2(max(ratios, default=1.0)))


def open_parameters(model: Model, run: PointRun) -> Iterator[str]:
    """Yield unidentified parameters that may take a large share of the step latency of ``run``."""
    for column, term in enumerate(STEP_TERMS):
        parameter = model.parameters.get(term.name)
        if parameter is None or parameter.identified or (share := _most_share(run, column, parameter)) < MATTERS:
            continue
        why = f" ({parameter.note})" if parameter.note else ""
        yield f"{term.name} is not identified{why}, and may take up to {share:.0%} of the step time"


def _most_share(run: PointRun, column: int, parameter: Parameter) -> float:
    times_ms = run.counts.sum(axis=0) * run.costs
    parameter_ms = float(run.counts[:, column].sum()) * max(parameter.value, parameter.high or 0.0)
    other_ms = float(times_ms.sum() - times_ms[column])
    return parameter_ms / (parameter_ms + other_ms) if parameter_ms else 0.0
