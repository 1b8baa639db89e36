"""API server before the scheduler, on a core of its own or on the engine's.

On the engine's core each of the two gets half of it while the other has work. The API server's work during a step is
counted in that step's row, other work in a row of its own: so the model stays linear.
"""

import numpy as np

from measure.machinecode.kernels import kernel
from sim.kernels.layout import PARALLEL, SimState
from sim.latency import terms
from tracefile.records.arrays import FloatArray

DONE_MS = 1e-9  # rounding may leave so much of a job; far from t = 0, as much as does not move the clock any more
_count_reception = kernel(terms.count_reception)
_reception_ms = kernel(terms.reception_ms)


@kernel
def work_ms(state: SimState, place: int) -> float:
    tokens = state.scheduler.requests[place].prompt_tokens
    return float(_reception_ms(state.costs, tokens) * state.draws.frontend[place])


@kernel
def entry_ms(state: SimState, place: int, arrival_ms: float) -> float:
    """Time at which an API server on a core of its own hands a request over (``sim.latency.terms.FrontendClock``)."""
    if state.scheduler.settings[0].placement == PARALLEL:
        return arrival_ms + work_ms(state, place)
    clock = state.clock[0]
    clock.frontend_free_ms = max(arrival_ms, clock.frontend_free_ms) + work_ms(state, place)
    return float(clock.frontend_free_ms)


@kernel
def accept_job(state: SimState, place: int) -> None:
    clock = state.clock[0]
    state.jobs[clock.last_job] = place
    clock.last_job += 1
    state.runs[place].left_ms = work_ms(state, place)


@kernel
def run_beside(state: SimState, left_ms: float, until_ms: float, row: FloatArray) -> float:
    """Run until ``left_ms`` of the engine's work are done, or until ``until_ms``; return the rest.

    A fleet's engine pauses before a span that would end after the horizon: the arithmetic does not depend on pauses.
    """
    clock = state.clock[0]
    now_ms, pause_ms = clock.now_ms, np.inf
    if state.scheduler.settings[0].pauses:
        pause_ms = clock.horizon_ms
    while left_ms > 0.0 and now_ms < until_ms:
        alone = clock.first_job == clock.last_job
        span_ms = min(left_ms, until_ms - now_ms)
        if not alone:
            place = state.jobs[clock.first_job]
            span_ms = min(2.0 * left_ms, 2.0 * state.runs[place].left_ms, until_ms - now_ms)
        if now_ms + span_ms > pause_ms:
            clock.resumes_ms = now_ms + span_ms
            break
        now_ms += span_ms
        if alone:
            left_ms -= span_ms
            continue
        left_ms = max(left_ms - span_ms / 2.0, 0.0)
        _work(state, span_ms / 2.0, now_ms, row)
    clock.now_ms = now_ms
    return left_ms


@kernel
def run_alone(state: SimState, until_ms: float, row: FloatArray) -> None:
    """Run while the engine is idle, to the end of the current job or to ``until_ms``; ``row`` counts the work."""
    clock = state.clock[0]
    place, start_ms = state.jobs[clock.first_job], clock.now_ms
    end_ms = min(start_ms + state.runs[place].left_ms, until_ms)
    clock.now_ms = end_ms
    _work(state, end_ms - start_ms, end_ms, row)


@kernel
def _work(state: SimState, span_ms: float, now_ms: float, row: FloatArray) -> None:
    """Do ``span_ms`` of the current job, which ends at ``now_ms`` if that is the rest of it."""
    clock = state.clock[0]
    place = state.jobs[clock.first_job]
    run, whole_ms = state.runs[place], work_ms(state, place)
    run.left_ms -= span_ms
    if run.left_ms <= DONE_MS or now_ms + run.left_ms == now_ms:
        clock.first_job += 1
        state.done[clock.num_done].time_ms = now_ms
        state.done[clock.num_done].code = place
        clock.num_done += 1
    share = span_ms / whole_ms if whole_ms > 0.0 else 1.0
    _count_reception(row, share, share * state.scheduler.requests[place].prompt_tokens)
