"""What becomes of arrivals, as in ``sim.engine.engine``: into the scheduler, to an end, to their children."""

import math

import numpy as np

from sim.kernels.compiling import kernel
from sim.kernels.frontend import accept_job, entry_ms, work_ms
from sim.kernels.heap import pop, push
from sim.kernels.layout import (
    ABORTED,
    ABSENT,
    AS_RECORDED,
    NO_OUTCOME,
    OK,
    PARENT_FAILED,
    SHARED_CORE,
    UNSERVABLE,
    WAITING,
    World,
)
from sim.kernels.scheduler import abort, accepts, add


@kernel
def next_ms(world: World) -> float:
    """When the next thing happens outside; infinity: nothing will."""
    clock, first_ms = world.clock[0], np.inf
    if clock.num_arrivals:
        first_ms = world.arrivals[0].time_ms
    if clock.num_events:
        first_ms = min(first_ms, world.events[0].time_ms)
    return first_ms


@kernel
def deliver_events(world: World) -> None:
    """Everything that has happened outside by now, in its order, up to where arrivals may be missing."""
    clock = world.clock[0]
    while next_ms(world) <= clock.now_ms and next_ms(world) < clock.horizon_ms:
        arrives = clock.num_arrivals > 0 and (
            clock.num_events == 0 or world.arrivals[0].time_ms <= world.events[0].time_ms
        )
        if arrives:
            _next_arrival(world)
            continue
        time_ms, code = world.events[0].time_ms, world.events[0].code
        pop(world.events, clock.num_events)
        clock.num_events -= 1
        # Entries before aborts, each by place: the code counts the entries first.
        if code < len(world.flights):
            _enter(world, code, time_ms)
        else:
            _abort(world, code - len(world.flights))


@kernel
def receive(world: World) -> None:
    """Arrivals by now, while a step runs."""
    clock = world.clock[0]
    while clock.num_arrivals > 0 and world.arrivals[0].time_ms <= clock.now_ms:
        _next_arrival(world)


@kernel
def hand_over(world: World) -> None:
    """What the front end on the shared core has finished enters the scheduler at its next step."""
    clock = world.clock[0]
    for number in range(clock.num_done):
        _at(world, world.done[number].time_ms, world.done[number].code)
    clock.num_done = 0


@kernel
def end(world: World, place: int, outcome: np.int64) -> None:
    """Fix what the client saw, and let the children follow."""
    flight = world.flights[place]
    left_ms = flight.arrival_ms + (0.0 if math.isnan(flight.patience_ms) else flight.patience_ms)
    if outcome == OK and not math.isnan(flight.patience_ms) and world.clock[0].seen_ms > left_ms:
        outcome = ABORTED  # its last token came after the client had gone
    flight.outcome = outcome
    if outcome == ABORTED:
        _forget_unseen(world, place, left_ms)
    if flight.num_seen:
        _see_tokens(world, place)
    if outcome == ABORTED:
        flight.e2e_ms = flight.patience_ms
    _release_children(world, place)


@kernel
def _at(world: World, time_ms: float, code: int) -> None:
    push(world.events, world.clock[0].num_events, time_ms, code)
    world.clock[0].num_events += 1


@kernel
def _next_arrival(world: World) -> None:
    clock = world.clock[0]
    time_ms, place = world.arrivals[0].time_ms, world.arrivals[0].code
    pop(world.arrivals, clock.num_arrivals)
    clock.num_arrivals -= 1
    _arrive(world, place, time_ms)


@kernel
def _arrive(world: World, place: int, time_ms: float) -> None:
    flight, scheduler = world.flights[place], world.scheduler
    flight.arrival_ms = time_ms
    if flight.as_recorded:
        flight.e2e_ms = flight.recorded_e2e_ms
        end(world, place, AS_RECORDED)
        return
    if not accepts(scheduler, place):
        flight.e2e_ms = work_ms(world, place)
        end(world, place, UNSERVABLE)
        return
    scheduler.requests[place].state = WAITING
    scheduler.requests[place].arrival_ms = time_ms
    if scheduler.settings[0].placement == SHARED_CORE:
        accept_job(world, place)
    else:
        _at(world, entry_ms(world, place, time_ms), place)
    if not math.isnan(flight.patience_ms):
        _at(world, time_ms + flight.patience_ms, place + len(world.flights))


@kernel
def _enter(world: World, place: int, time_ms: float) -> None:
    flight = world.flights[place]
    if flight.outcome == NO_OUTCOME:
        flight.entry_ms = time_ms
        add(world.scheduler, place)


@kernel
def _abort(world: World, place: int) -> None:
    flight = world.flights[place]
    if flight.outcome != NO_OUTCOME or world.scheduler.requests[place].state == ABSENT:
        return
    if not math.isnan(flight.entry_ms):
        abort(world.scheduler, place)
    end(world, place, ABORTED)


@kernel
def _forget_unseen(world: World, place: int, left_ms: float) -> None:
    """The client had gone before the last of its tokens."""
    flight, seen_ms = world.flights[place], world.timeline.seen_ms
    while flight.num_seen and seen_ms[world.token_steps[flight.first_token + flight.num_seen - 1]] > left_ms:
        flight.num_seen -= 1


@kernel
def _see_tokens(world: World, place: int) -> None:
    """TTFT, gaps and end as the client sees them."""
    flight, times_ms, steps = world.flights[place], world.timeline.seen_ms, world.token_steps
    first = flight.first_token
    seen_ms = times_ms[steps[first]]
    flight.ttft_ms = seen_ms - flight.arrival_ms
    for token in range(first + 1, first + flight.num_seen):
        before_ms, seen_ms = seen_ms, times_ms[steps[token]]
        world.itl_ms[token] = seen_ms - before_ms
    flight.e2e_ms = seen_ms - flight.arrival_ms


@kernel
def _release_children(world: World, place: int) -> None:
    """A child arrives its think time after its parent's end; of one that failed it fails too, and all below it."""
    flights, clock, failed = world.flights, world.clock[0], world.flights[place].outcome == UNSERVABLE
    parent, child = place, flights[place].first_child
    while child >= 0 or parent != place:
        if child < 0:  # up again, to the next in line
            child = flights[parent].next_child
            parent = flights[parent].parent
            continue
        before = flights[parent]
        arrival_ms = before.arrival_ms + (0.0 if math.isnan(before.e2e_ms) else before.e2e_ms) + flights[child].think_ms
        if failed:
            flights[child].arrival_ms = arrival_ms
            flights[child].outcome = PARENT_FAILED
            parent, child = child, flights[child].first_child
        else:
            push(world.arrivals, clock.num_arrivals, arrival_ms, child)
            clock.num_arrivals += 1
            child = flights[child].next_child
