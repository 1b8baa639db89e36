"""Requests from arrival to end: into the scheduler, to an outcome, then their children."""

import math
from typing import Any

import numpy as np

from measure.machinecode.kernels import kernel
from sim.kernels.frontend import accept_job, entry_ms, work_ms
from sim.kernels.layout import (
    ABORTED,
    ABSENT,
    AS_RECORDED,
    LOADING,
    NO_OUTCOME,
    NONE,
    OK,
    PARENT_FAILED,
    SHARED_CORE,
    UNSERVABLE,
    WAITING,
    Records,
    SimState,
)
from sim.kernels.scheduler import abort, accepts, add, take_up


@kernel
def next_ms(state: SimState) -> float:
    """Time of the next event; infinity: there is none."""
    clock, first_ms = state.clock[0], np.inf
    if clock.num_arrivals:
        first_ms = state.arrivals[0].time_ms
    if clock.num_events:
        first_ms = min(first_ms, state.events[0].time_ms)
    return first_ms


@kernel
def deliver_events(state: SimState) -> None:
    """Deliver all events up to now, in order, as far as no arrival can be missing."""
    clock = state.clock[0]
    while next_ms(state) <= clock.now_ms and next_ms(state) < clock.horizon_ms:
        arrives = clock.num_arrivals > 0 and (
            clock.num_events == 0 or state.arrivals[0].time_ms <= state.events[0].time_ms
        )
        if arrives:
            _next_arrival(state)
            continue
        time_ms, code = state.events[0].time_ms, state.events[0].code
        pop(state.events, clock.num_events)
        clock.num_events -= 1
        # Entries before aborts before ends of loads, each by place: the code counts the entries first.
        kind, place = code // len(state.runs), code % len(state.runs)
        if kind == 0:
            _enter(state, place, time_ms)
        elif kind == 1:
            _abort(state, place)
        elif state.scheduler.requests[place].state == LOADING:
            take_up(state.scheduler, place)


@kernel
def receive(state: SimState) -> None:
    clock = state.clock[0]
    while clock.num_arrivals > 0 and state.arrivals[0].time_ms <= clock.now_ms:
        _next_arrival(state)


@kernel
def hand_over(state: SimState) -> None:
    """Hand requests that the API server on the shared core has finished to the scheduler."""
    clock = state.clock[0]
    for number in range(clock.num_done):
        _at(state, state.done[number].time_ms, state.done[number].code)
    clock.num_done = 0


@kernel
def end(state: SimState, place: int, outcome: np.int64) -> None:
    run = state.runs[place]
    left_ms = run.arrival_ms + (0.0 if math.isnan(run.abort_after_ms) else run.abort_after_ms)
    if outcome == OK and not math.isnan(run.abort_after_ms) and state.clock[0].seen_ms > left_ms:
        outcome = ABORTED  # its last token came after the client had gone
    run.outcome = outcome
    if outcome == ABORTED:
        _forget_unseen(state, place, left_ms)
    if run.num_seen:
        _see_tokens(state, place)
    if outcome == ABORTED:
        run.e2e_ms = run.abort_after_ms
    release_children(state.runs, state.clock[0], state.arrivals, place)
    clock = state.clock[0]
    clock.horizon_ms = min(clock.horizon_ms, end_ms(run) + run.next_think_ms)


@kernel
def _at(state: SimState, time_ms: float, code: int) -> None:
    push(state.events, state.clock[0].num_events, time_ms, code)
    state.clock[0].num_events += 1


@kernel
def _next_arrival(state: SimState) -> None:
    clock = state.clock[0]
    time_ms, place = state.arrivals[0].time_ms, state.arrivals[0].code
    pop(state.arrivals, clock.num_arrivals)
    clock.num_arrivals -= 1
    _arrive(state, place, time_ms)


@kernel
def _arrive(state: SimState, place: int, time_ms: float) -> None:
    run, scheduler = state.runs[place], state.scheduler
    run.arrival_ms = time_ms
    if run.as_recorded:
        run.e2e_ms = run.recorded_e2e_ms
        end(state, place, AS_RECORDED)
        return
    if not accepts(scheduler, place):
        run.e2e_ms = work_ms(state, place)
        end(state, place, UNSERVABLE)
        return
    scheduler.requests[place].state = WAITING
    scheduler.requests[place].arrival_ms = time_ms
    if scheduler.settings[0].placement == SHARED_CORE:
        accept_job(state, place)
    else:
        _at(state, entry_ms(state, place, time_ms), place)
    if not math.isnan(run.abort_after_ms):
        _at(state, time_ms + run.abort_after_ms, place + len(state.runs))


@kernel
def _enter(state: SimState, place: int, time_ms: float) -> None:
    run = state.runs[place]
    if run.outcome == NO_OUTCOME:
        run.entry_ms = time_ms
        add(state.scheduler, place)


@kernel
def await_loads(state: SimState) -> None:
    """Note when the requests come back that begin to wait for blocks from a tier."""
    tier = state.scheduler.tier
    place = tier.state[0].first_loading
    while place != NONE and not tier.requests[place].noted:
        tier.requests[place].noted = 1
        _at(state, tier.requests[place].done_ms, place + 2 * len(state.runs))
        place = tier.requests[place].next


@kernel
def _abort(state: SimState, place: int) -> None:
    run = state.runs[place]
    if run.outcome != NO_OUTCOME or state.scheduler.requests[place].state == ABSENT:
        return
    if not math.isnan(run.entry_ms):
        abort(state.scheduler, place)
    end(state, place, ABORTED)


@kernel
def _forget_unseen(state: SimState, place: int, left_ms: float) -> None:
    """Drop tokens that came after the client had gone."""
    run, seen_ms = state.runs[place], state.timeline.seen_ms
    while run.num_seen and seen_ms[state.token_steps[run.first_token + run.num_seen - 1]] > left_ms:
        run.num_seen -= 1


@kernel
def _see_tokens(state: SimState, place: int) -> None:
    run, times_ms, steps = state.runs[place], state.timeline.seen_ms, state.token_steps
    first = run.first_token
    seen_ms = times_ms[steps[first]]
    run.ttft_ms = seen_ms - run.arrival_ms
    for token in range(first + 1, first + run.num_seen):
        before_ms, seen_ms = seen_ms, times_ms[steps[token]]
        state.itl_ms[token] = seen_ms - before_ms
    run.e2e_ms = seen_ms - run.arrival_ms


@kernel
def end_ms(run: Any) -> float:
    return float(run.arrival_ms + (0.0 if math.isnan(run.e2e_ms) else run.e2e_ms))


@kernel
def release_children(runs: Records, clock: Any, arrivals: Records, place: int) -> None:
    """Let children arrive, each its think time after the parent's end; children of a failed request fail too."""
    failed = runs[place].outcome == UNSERVABLE
    parent, child = place, runs[place].first_child
    while child >= 0 or parent != place:
        if child < 0:  # up again, to the next in line
            child = runs[parent].next_child
            parent = runs[parent].parent
            continue
        arrival_ms = end_ms(runs[parent]) + runs[child].think_ms
        if failed:
            runs[child].arrival_ms = arrival_ms
            runs[child].outcome = PARENT_FAILED
            parent, child = child, runs[child].first_child
        else:
            push(arrivals, clock.num_arrivals, arrival_ms, child)
            clock.num_arrivals += 1
            child = runs[child].next_child


@kernel
def push(heap: Records, size: int, time_ms: float, code: int) -> None:
    """Add an event to a binary heap of ``size``, ordered by time and then by code; the caller counts it."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if not _is_before(time_ms, code, heap[parent].time_ms, heap[parent].code):
            break
        heap[place].time_ms = heap[parent].time_ms
        heap[place].code = heap[parent].code
        place = parent
    heap[place].time_ms = time_ms
    heap[place].code = code


@kernel
def pop(heap: Records, size: int) -> None:
    """Remove the first event, which the caller has read, from a heap of ``size``; the caller counts it."""
    last = size - 1
    time_ms, code = heap[last].time_ms, heap[last].code
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            break
        other = child + 1
        if other < last and _is_before(heap[other].time_ms, heap[other].code, heap[child].time_ms, heap[child].code):
            child = other
        if not _is_before(heap[child].time_ms, heap[child].code, time_ms, code):
            break
        heap[place].time_ms = heap[child].time_ms
        heap[place].code = heap[child].code
        place = child
    heap[place].time_ms = time_ms
    heap[place].code = code


@kernel
def _is_before(time_ms: float, code: int, other_ms: float, other_code: int) -> bool:
    return time_ms < other_ms or (time_ms == other_ms and code < other_code)
