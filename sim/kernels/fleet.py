"""Engines of a fleet in one virtual clock: each runs as far as no request can come to it that is not known yet.

``advance`` returns where a router has to choose an engine. Until then an engine may run to the next arrival, or to the
first moment at which a session can go on that waits for another engine. So none is ever ahead of an arrival by more
than the step that the arrival has to wait for, and each does what it would do alone with the requests that it gets.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel
from sim.kernels import layout
from sim.kernels.addresses import ENGINE_STATE, array_of, reader, shape_of
from sim.kernels.layout import (
    ABORTED,
    AS_RECORDED,
    NO_OUTCOME,
    NONE,
    SHARED_CORE,
    Places,
    Records,
    SimState,
    record,
)
from sim.kernels.loop import DONE, FULL, NOT_CHAINED, run
from sim.kernels.pool import lookup
from sim.kernels.requestruns import end_ms, next_ms, pop, push, release_children
from sim.kernels.routing import ASKED, END, FIRST_TOKEN, ROUTER_STATE, Router, hear, send
from sim.vllm import rules

ALL_ENDED, AT_STOP, NO_ROOM, BAD_CHAIN = range(-1, -5, -1)
"""Returned in place of a request: all have ended; the clock is at ``stop_ms``; an engine's timeline or arenas are full;
a hash occurs at two depths."""
FLEET_CLOCK = record("num_arrivals num_events num_told engine", times="now_ms stop_ms")
"""``stop_ms``: where to return in any case; ``engine``: the one without room."""
FLEET_ENGINE = record("num_in_flight", times="resumes_ms bound_ms")
"""``resumes_ms``: nothing happens in it before; ``bound_ms``: no session that waits for it goes on before."""


class Fleet(NamedTuple):
    """State that engines share: requests, and events that the router is told of."""

    clock: Records
    runs: Records
    """REQUEST_RUN by place: links, and the outcome of those that ended. ``entry_ms``: when it came to the router;
    ``num_seen``: above 0 from the first token on. Times count from the arrival at the router."""
    arrivals: Records
    """A heap of EVENT, by time and place."""
    events: Records
    """A heap of EVENT not told yet; codes are 2 × place + kind."""
    told: Records
    """EVENT in order, up to the clock."""
    engines: Records
    in_flight: Places
    """Places, ``num_in_flight`` of them in the row of each engine."""
    router: Router


FLEET_STATE = shape_of(
    Fleet,
    clock=FLEET_CLOCK,
    runs=layout.REQUEST_RUN,
    arrivals=layout.EVENT,
    events=layout.EVENT,
    told=layout.EVENT,
    engines=FLEET_ENGINE,
    in_flight=array_of(np.int64, 2),
    router=ROUTER_STATE,
)
_lookup_limit = kernel(rules.lookup_limit)
_engine_at = reader(ENGINE_STATE)
_fleet_at = reader(FLEET_STATE)


@entry
def advance(addresses: Places, place: int, engine: int) -> int:
    """Hand the request at ``place`` (none below 0) over to ``engine``, and run to the next one that needs an engine.

    ``addresses``: of the engines' states, of a compiled router's pools, and of the fleet's state in the last row.
    """
    fleet = _fleet_at(addresses, len(addresses) - 1)
    clock = fleet.clock[0]
    if place >= 0:
        _hand_over(fleet, _engine_at(addresses, engine), place, engine)
    while True:
        arrival_ms = np.inf
        if clock.num_arrivals:
            arrival_ms = fleet.arrivals[0].time_ms
        until_ms = min(arrival_ms, clock.stop_ms)
        engine = _furthest_behind(fleet, until_ms)
        if engine != NONE:
            stop = _run_engine(fleet, _engine_at(addresses, engine), engine, until_ms)
            if stop == FULL:
                clock.engine = engine
                return NO_ROOM
            if stop == NOT_CHAINED:
                return BAD_CHAIN
            continue
        _tell_until(fleet, until_ms)
        if fleet.router.settings[0].policy != ASKED:
            hear(fleet.router, fleet.told, clock.num_told)
            clock.num_told = 0
        if until_ms == np.inf:
            return ALL_ENDED
        clock.now_ms = until_ms
        if clock.stop_ms <= arrival_ms:
            return AT_STOP
        coming = fleet.arrivals[0].code
        pop(fleet.arrivals, clock.num_arrivals)
        clock.num_arrivals -= 1
        if not _needs_engine(fleet, coming):
            continue
        if fleet.router.settings[0].policy == ASKED:
            return int(coming)
        engine = send(fleet.router, addresses, coming, clock.now_ms)
        _hand_over(fleet, _engine_at(addresses, engine), coming, engine)


@entry
def look(addresses: Places, place: int, cached: Places) -> None:
    """Count, by engine, the leading blocks that it holds of the request at ``place``, which has just come."""
    for engine in range(len(addresses) // 2):
        scheduler = _engine_at(addresses, engine).scheduler
        request, block_size = scheduler.requests[place], scheduler.settings[0].block_size
        most = _lookup_limit(request.prompt_tokens, block_size, request.prompt_logprobs)
        cached[engine], _ = lookup(scheduler.pool, request, most)


@kernel
def _needs_engine(fleet: Fleet, place: int) -> bool:
    """Note the arrival of a request at the router; one that failed before it got to an engine ends as recorded."""
    request_run, now_ms = fleet.runs[place], fleet.clock[0].now_ms
    if math.isnan(request_run.entry_ms):
        request_run.arrival_ms = request_run.entry_ms = now_ms
    if not request_run.as_recorded:
        return True
    request_run.e2e_ms, request_run.outcome = request_run.recorded_e2e_ms, AS_RECORDED
    release_children(fleet.runs, fleet.clock[0], fleet.arrivals, place)
    return False


@kernel
def _hand_over(fleet: Fleet, state: SimState, place: int, engine: int) -> None:
    known, clock, now_ms = fleet.engines[engine], state.clock[0], fleet.clock[0].now_ms
    push(state.arrivals, clock.num_arrivals, now_ms, place)
    clock.num_arrivals += 1
    state.runs[place].arrival_ms = now_ms
    fleet.in_flight[engine, known.num_in_flight] = place
    known.num_in_flight += 1
    known.resumes_ms = min(known.resumes_ms, max(now_ms, clock.now_ms))
    left_ms = now_ms + state.runs[place].abort_after_ms
    if left_ms < clock.now_ms:  # the router sees that the client goes, even during the engine's step
        known.resumes_ms = min(known.resumes_ms, left_ms)
    known.bound_ms = min(known.bound_ms, known.resumes_ms + state.runs[place].next_think_ms)


@kernel
def _furthest_behind(fleet: Fleet, until_ms: float) -> int:
    """Return the engine that has something to do before all others and before ``until_ms``; NONE: none has."""
    found, first_ms = NONE, until_ms
    for engine in range(len(fleet.engines)):
        if fleet.engines[engine].resumes_ms < first_ms:
            found, first_ms = engine, fleet.engines[engine].resumes_ms
    return found


@kernel
def _run_engine(fleet: Fleet, state: SimState, engine: int, until_ms: float) -> int:
    """Run an engine to ``until_ms``, or to where another one may let a session go on."""
    known = fleet.engines[engine]
    for other in range(len(fleet.engines)):
        if other != engine:
            until_ms = min(until_ms, np.nextafter(fleet.engines[other].bound_ms, np.inf))
    if state.scheduler.settings[0].placement == SHARED_CORE:  # a turn that comes during a step delays the step
        until_ms = min(until_ms, np.nextafter(_after_leaving_ms(fleet, state, engine), np.inf))
    state.clock[0].horizon_ms = until_ms
    stop = run(state)
    known.resumes_ms = _resumes_ms(state, stop)
    known.bound_ms = known.resumes_ms + _collect(fleet, state, engine)
    return stop


@kernel
def _after_leaving_ms(fleet: Fleet, state: SimState, engine: int) -> float:
    """Return the first time at which a session may go on whose client goes before its answer's end."""
    known, first_ms = fleet.engines[engine], np.inf
    for place in fleet.in_flight[engine, : known.num_in_flight]:
        here = state.runs[place]
        if fleet.runs[place].outcome == NO_OUTCOME and not math.isnan(here.abort_after_ms):
            first_ms = min(first_ms, here.arrival_ms + here.abort_after_ms + here.next_think_ms)
    return float(first_ms)


@kernel
def _resumes_ms(state: SimState, stop: int) -> float:
    """Time before which nothing happens in an engine that stopped."""
    clock = state.clock[0]
    if stop == DONE:
        return float(np.inf)
    if clock.running != NONE:
        return float(clock.resumes_ms)
    if stop == FULL or clock.composed != NONE or clock.now_ms >= clock.horizon_ms:
        return float(min(clock.now_ms, next_ms(state)))  # a client may have gone during the step
    resumes_ms = next_ms(state)
    if clock.first_job < clock.last_job:
        resumes_ms = min(resumes_ms, clock.now_ms + state.runs[state.jobs[clock.first_job]].left_ms)
    return float(resumes_ms)


@kernel
def _collect(fleet: Fleet, state: SimState, engine: int) -> float:
    """Note first tokens and ends of the engine's requests; return the shortest think time after those in flight."""
    known, places, kept, least_ms = fleet.engines[engine], fleet.in_flight[engine], 0, np.inf
    for number in range(known.num_in_flight):
        place = places[number]
        here, whole = state.runs[place], fleet.runs[place]
        if whole.num_seen == 0 and here.num_seen > 0:
            whole.num_seen = 1
            _note(fleet, state.timeline.seen_ms[state.token_steps[here.first_token]], 2 * place + FIRST_TOKEN)
        if here.outcome == NO_OUTCOME:
            places[kept] = place
            kept += 1
            if whole.outcome == NO_OUTCOME and _leaves_during_pause(state, here):
                whole.outcome, whole.e2e_ms = ABORTED, here.arrival_ms - whole.arrival_ms + here.abort_after_ms
                _end(fleet, place)
            if whole.outcome == NO_OUTCOME:
                least_ms = min(least_ms, here.next_think_ms)
            continue
        moved_ms, was_left = here.arrival_ms - whole.arrival_ms, whole.outcome == ABORTED
        whole.outcome, whole.num_seen = here.outcome, here.num_seen
        whole.ttft_ms, whole.e2e_ms = here.ttft_ms + moved_ms, here.e2e_ms + moved_ms
        if not was_left:
            _end(fleet, place)
    known.num_in_flight = kept
    return float(least_ms)


@kernel
def _leaves_during_pause(state: SimState, here: Any) -> bool:
    """Return whether the client goes before a step that pauses goes on: nothing can end the request before."""
    if state.clock[0].running == NONE or math.isnan(here.abort_after_ms):
        return False
    return bool(here.arrival_ms + here.abort_after_ms < state.clock[0].resumes_ms)


@kernel
def _end(fleet: Fleet, place: int) -> None:
    _note(fleet, end_ms(fleet.runs[place]), 2 * place + END)
    release_children(fleet.runs, fleet.clock[0], fleet.arrivals, place)


@kernel
def _note(fleet: Fleet, time_ms: float, code: int) -> None:
    push(fleet.events, fleet.clock[0].num_events, time_ms, code)
    fleet.clock[0].num_events += 1


@kernel
def _tell_until(fleet: Fleet, until_ms: float) -> None:
    clock = fleet.clock[0]
    while clock.num_events > 0 and fleet.events[0].time_ms <= until_ms:
        told = fleet.told[clock.num_told]
        told.time_ms, told.code = fleet.events[0].time_ms, fleet.events[0].code
        clock.num_told += 1
        pop(fleet.events, clock.num_events)
        clock.num_events -= 1
