"""The step loop, as in ``sim.engine.engine.Engine``: deliver, compose, run, skip what would be the same again."""

import math

import numpy as np

from sim.kernels.boundaries import can_cross, cross, forget_due, is_due, note_due
from sim.kernels.compiling import entry, kernel
from sim.kernels.flights import deliver_events, end, hand_over, next_ms, receive
from sim.kernels.frontend import run_alone, run_beside
from sim.kernels.layout import FINISHED, OK, SHARED_CORE, Floats, World
from sim.kernels.noise import step_factor
from sim.kernels.scheduler import finish_step, schedule

NONE = -1
NUM_STEP_TERMS = 9
DONE, FULL, MORE, NOT_CHAINED = range(4)
"""Why a run stopped: nothing is left to arrive or to compute; the timeline or the arenas of tokens are full; the next
arrivals are wanted; a hash occurs at two depths."""
_ROUNDING = 1.0 + 1e-9


@entry
def run(world: World) -> int:
    """Run until there is a reason to stop; after FULL and MORE, call again with what is wanted."""
    clock, ahead = world.clock[0], world.scheduler.settings[0].composes_ahead
    while clock.num_steps + 1 < len(world.timeline.ends_ms):
        deliver_events(world)
        if clock.now_ms >= clock.horizon_ms:
            return MORE
        slot = max(clock.composed, 0)
        if clock.composed == NONE:
            if not _compose_first(world, slot):
                if not _idle(world):
                    return DONE if clock.horizon_ms == np.inf else MORE
                continue
            clock.composed = slot
        if _may_outlast_horizon(world, slot):
            return MORE
        if not _give_room(world, slot):
            return FULL
        clock.composed = NONE
        if ahead and _compose(world, 1 - slot):
            clock.composed = 1 - slot
        if world.scheduler.pool.counts[0].not_chained:
            return NOT_CHAINED
        _run_step(world, slot)
        if ahead:
            if clock.composed != NONE:
                _skip_decodes(world, clock.composed)
        else:
            _skip_decodes(world, slot)
    return FULL


@kernel
def _compose_first(world: World, slot: int) -> bool:
    """Compose a step while none runs; if all of one's shares went to make room, the engine composes again at once."""
    preemptions = -1
    while preemptions != world.clock[0].preemptions:
        preemptions = world.clock[0].preemptions
        if _compose(world, slot):
            return True
    return False


@kernel
def _compose(world: World, slot: int) -> bool:
    """Compose the next step; False if there is nothing to compute."""
    scheduler = world.scheduler
    if scheduler.state[0].num_running + scheduler.state[0].num_waiting == 0:
        return False
    schedule(scheduler, slot)
    step, now_ms = scheduler.steps[slot], world.clock[0].now_ms
    world.clock[0].preemptions += step.preempted
    for number in range(step.count - step.admitted, step.count):
        flight = world.flights[scheduler.shares[slot, number].place]
        if math.isnan(flight.admitted_ms):
            flight.admitted_ms = now_ms
    return bool(step.count > 0)


@kernel
def _may_outlast_horizon(world: World, slot: int) -> bool:
    """Whether arrivals may come in the step's time that are not there yet, and matter: those on its own core do."""
    if world.scheduler.settings[0].placement != SHARED_CORE or world.clock[0].horizon_ms == np.inf:
        return False
    _count(world, slot)
    return bool(_latest_end_ms(world) >= world.clock[0].horizon_ms)


@kernel
def _latest_end_ms(world: World) -> float:
    """Of the step in the timeline's next row on a shared core: beside the front end it takes twice as long."""
    clock = world.clock[0]
    step_ms = clock.slowest_factor * _step_ms(world) + clock.carried_ms
    return float((clock.now_ms + 2.0 * step_ms) * _ROUNDING)


@kernel
def _give_room(world: World, slot: int) -> bool:
    """Give whoever gets a first token in the step a part of the arenas of tokens; False if there is too little."""
    clock, scheduler, end = world.clock[0], world.scheduler, len(world.token_steps)
    for number in range(scheduler.steps[slot].count):
        share = scheduler.shares[slot, number]
        flight, request = world.flights[share.place], scheduler.requests[share.place]
        if share.samples and flight.first_token == NONE:
            most = request.last_token - request.prompt_tokens
            if clock.num_tokens + most > end:
                return False
            flight.first_token = clock.num_tokens
            clock.num_tokens += most
    return True


@kernel
def _run_step(world: World, slot: int) -> None:
    """Move the clock over a step; its tokens appear at its end."""
    scheduler = world.scheduler
    _count(world, slot)
    _advance(world)
    last, shares = world.clock[0].num_steps - 1, scheduler.shares[slot]
    beginning = 0
    for number in range(scheduler.steps[slot].count):
        place = shares[number].place
        if shares[number].samples and scheduler.requests[place].state != FINISHED:
            flight = world.flights[place]
            if flight.num_seen == 0:
                beginning += scheduler.requests[place].prompt_tokens
            world.token_steps[flight.first_token + flight.num_seen] = last
            flight.num_seen += 1
    finished = finish_step(scheduler, slot)
    if beginning:
        _deliver(world, beginning)
    for number in range(finished):
        end(world, scheduler.finished[number], OK)


@kernel
def _deliver(world: World, prompt_tokens: int) -> None:
    """The last step has first tokens of prompts of so many together: all of its tokens are seen as much later. On a
    shared core the engine, if it goes on, takes half of it meanwhile."""
    clock, state = world.clock[0], world.scheduler.state[0]
    work_ms = world.costs[0].delivery_ms_per_prompt_token * prompt_tokens
    goes_on = clock.composed != NONE or state.num_running + state.num_waiting > 0
    shared = goes_on and world.scheduler.settings[0].placement == SHARED_CORE
    clock.carried_ms = work_ms if shared else 0.0
    clock.seen_ms = max(clock.seen_ms, clock.now_ms + work_ms + clock.carried_ms)
    world.timeline.seen_ms[clock.num_steps - 1] = clock.seen_ms


@kernel
def _idle(world: World) -> bool:
    """Let the clock go on without the engine, to whatever happens next; False if nothing does before the horizon."""
    clock = world.clock[0]
    if clock.first_job < clock.last_job:
        start_ms, row = clock.now_ms, world.timeline.rows[clock.num_steps]
        left_ms = world.flights[world.jobs[clock.first_job]].left_ms
        if min(start_ms + left_ms, next_ms(world)) >= clock.horizon_ms:
            return False
        row[:] = 0.0
        row[NUM_STEP_TERMS], row[NUM_STEP_TERMS + 1] = run_alone(world, next_ms(world))
        _append(world, start_ms)
        hand_over(world)
        return True
    coming_ms = next_ms(world)
    if coming_ms >= clock.horizon_ms:
        return False
    clock.now_ms = max(clock.now_ms, coming_ms)
    return True


@kernel
def _count(world: World, slot: int) -> None:
    """Count a step in every term, as ``sim.latency.terms.step_row`` does, in the timeline's next row."""
    scheduler = world.scheduler
    requests, shares = scheduler.requests, scheduler.shares[slot]
    chunks, tokens, depths, decodes, kv_tokens = 0, 0, 0, 0, 0
    attention, square = 0.0, 0.0
    for number in range(scheduler.steps[slot].count):
        share = shares[number]
        if share.num_tokens == 1 and share.depth >= requests[share.place].prompt_tokens:
            decodes += 1
            kv_tokens += share.depth
            continue
        half_square = share.num_tokens * share.num_tokens / 2
        chunks += 1
        tokens += share.num_tokens
        depths += share.depth
        square += half_square
        attention += share.num_tokens * share.depth + half_square
    row = world.timeline.rows[world.clock[0].num_steps]
    row[0], row[1], row[2], row[3], row[4] = 1.0, tokens, attention, decodes, kv_tokens
    row[5], row[6], row[7], row[8] = chunks, depths, square, 1.0 if chunks else 0.0


@kernel
def _advance(world: World) -> None:
    """Move the clock over the step in the timeline's next row, and the front end with it on a shared core."""
    clock, row = world.clock[0], world.timeline.rows[world.clock[0].num_steps]
    start_ms, step_ms = clock.now_ms, _step_ms(world)
    step_ms = step_ms * step_factor(world, start_ms, step_ms) + clock.carried_ms
    clock.carried_ms = 0.0
    if world.scheduler.settings[0].placement == SHARED_CORE:
        row[NUM_STEP_TERMS], row[NUM_STEP_TERMS + 1] = _share_core(world, step_ms)
    else:
        clock.now_ms = start_ms + step_ms
    _append(world, start_ms)


@kernel
def _step_ms(world: World) -> float:
    """How long the engine computes at the step in the timeline's next row, but for its noise."""
    costs, row = world.costs[0], world.timeline.rows[world.clock[0].num_steps]
    step_ms = (
        costs.t0_ms
        + costs.per_prefill_token_ms * row[1]
        + costs.per_attention_token2_ms * row[2]
        + costs.per_decode_ms * row[3]
        + costs.per_kv_token_ms * row[4]
    )
    if row[5] > 0.0:
        step_ms += (
            costs.per_prefill_chunk_ms * row[5]
            + costs.per_prefill_depth_ms * row[6]
            + costs.per_chunk_square_ms * row[7]
            + costs.prefill_step_ms
        )
    return float(step_ms)


@kernel
def _share_core(world: World, left_ms: float) -> tuple[float, float]:
    """Run ``left_ms`` of the engine's work beside the front end's; what the latter did."""
    clock, requests, tokens = world.clock[0], 0.0, 0.0
    while left_ms > 0.0:
        receive(world)
        until_ms = np.inf
        if clock.num_arrivals:
            until_ms = world.arrivals[0].time_ms
        left_ms, more_requests, more_tokens = run_beside(world, left_ms, until_ms)
        requests += more_requests
        tokens += more_tokens
    hand_over(world)
    return requests, tokens


@kernel
def _append(world: World, start_ms: float) -> None:
    clock = world.clock[0]
    world.timeline.starts_ms[clock.num_steps] = start_ms
    world.timeline.ends_ms[clock.num_steps] = clock.now_ms
    clock.seen_ms = max(clock.seen_ms, clock.now_ms)
    world.timeline.seen_ms[clock.num_steps] = clock.seen_ms
    clock.num_steps += 1


@kernel
def _skip_decodes(world: World, slot: int) -> None:
    """Run, without the scheduler, the steps that would be the one in ``slot`` again: only decodes, none of which ends,
    and nothing happens outside. Whoever could not be admitted in it cannot be now, as nothing has been freed or queued
    since, or cached that it could hit. Composing ahead, it is the step yet to run; else the one that ran.
    """
    scheduler, clock = world.scheduler, world.clock[0]
    step, count = scheduler.steps[slot], scheduler.state[0].num_running
    same = step.preempted == 0 and step.admitted == 0 and step.count == count and step.total_tokens == count
    if count == 0 or not same or not scheduler.state[0].is_quiet:
        return
    most = min(_most_decodes(world), len(world.timeline.ends_ms) - clock.num_steps)
    if most <= 0:
        return
    requests, running, first = scheduler.requests, scheduler.running, clock.num_steps
    kv_tokens = 0
    for position in range(count):
        request = requests[running[position]]
        kv_tokens += request.num_computed - request.placeholders
    skipped = _decode(world, count, kv_tokens, most)
    for position in range(count):
        place = running[position]
        request, flight = requests[place], world.flights[place]
        token = flight.first_token + flight.num_seen
        for step_number in range(skipped):
            world.token_steps[token + step_number] = first + step_number
        flight.num_seen += skipped
        request.num_tokens += skipped
        request.num_computed += skipped
        scheduler.shares[slot, position].depth += skipped


@kernel
def _decode(world: World, decodes: int, kv_tokens: int, most: int) -> int:
    """Run up to ``most`` steps of decodes, from one in which blocks fill up to the next; how many."""
    scheduler, clock = world.scheduler, world.clock[0]
    first, done, until = clock.num_steps, 0, 0
    note_due(scheduler)
    while done < most and done == until:
        if is_due(scheduler, done):
            if not _is_undisturbed(world, decodes, kv_tokens + decodes * done) or not can_cross(scheduler, done):
                break
            cross(scheduler, done)
        until += 1
        while until < most and not is_due(scheduler, until):
            until += 1
        if scheduler.settings[0].placement == SHARED_CORE:
            _repeat_sharing(world, decodes, kv_tokens + decodes * done, first + until)
        else:
            wake_ms = min(next_ms(world), clock.horizon_ms)
            _repeat(world, decodes, kv_tokens + decodes * done, first + until, wake_ms)
        done = clock.num_steps - first
    forget_due(scheduler)
    return int(done)


@kernel
def _is_undisturbed(world: World, decodes: int, kv_tokens: int) -> bool:
    """Whether the engine need not look outside before its next step; on a shared core an arrival that is there is no
    reason."""
    clock = world.clock[0]
    if world.scheduler.settings[0].placement == SHARED_CORE:
        _set_decode_row(world.timeline.rows[clock.num_steps], decodes, kv_tokens)
        is_near = clock.horizon_ms < np.inf and _latest_end_ms(world) >= clock.horizon_ms
        return not is_near and bool(clock.num_events == 0 or clock.now_ms < world.events[0].time_ms)
    return bool(clock.now_ms < min(next_ms(world), clock.horizon_ms))


@kernel
def _repeat(world: World, decodes: int, kv_tokens: int, end_step: int, wake_ms: float) -> None:
    """Steps in which ``decodes`` requests decode on ``kv_tokens`` and more, to ``end_step`` or until ``wake_ms``."""
    costs, timeline, clock = world.costs, world.timeline, world.clock[0]
    number, now_ms, seen_ms = clock.num_steps, clock.now_ms, clock.seen_ms
    others_ms = costs[0].t0_ms + costs[0].per_decode_ms * decodes
    while number < end_step and now_ms < wake_ms:
        _set_decode_row(timeline.rows[number], decodes, kv_tokens)
        timeline.starts_ms[number] = now_ms
        step_ms = others_ms + costs[0].per_kv_token_ms * kv_tokens
        now_ms = now_ms + step_ms * step_factor(world, now_ms, step_ms)
        timeline.ends_ms[number] = now_ms
        seen_ms = max(seen_ms, now_ms)
        timeline.seen_ms[number] = seen_ms
        kv_tokens += decodes
        number += 1
    clock.num_steps = number
    clock.now_ms = now_ms
    clock.seen_ms = seen_ms


@kernel
def _repeat_sharing(world: World, decodes: int, kv_tokens: int, end_step: int) -> None:
    """The same on a shared core: an arrival alone does not end it, what the front end hands over does."""
    clock = world.clock[0]
    while clock.num_steps < end_step and _is_undisturbed(world, decodes, kv_tokens):
        _advance(world)
        kv_tokens += decodes


@kernel
def _set_decode_row(row: Floats, decodes: int, kv_tokens: int) -> None:
    row[0], row[1], row[2], row[3], row[4] = 1.0, 0.0, 0.0, decodes, kv_tokens
    row[5], row[6], row[7], row[8] = 0.0, 0.0, 0.0, 0.0


@kernel
def _most_decodes(world: World) -> int:
    """Steps in which all running requests only decode, and none ends."""
    scheduler = world.scheduler
    ahead, most = scheduler.settings[0].composes_ahead, 2**62
    for position in range(scheduler.state[0].num_running):
        request = scheduler.requests[scheduler.running[position]]
        computed, tokens = request.num_computed, request.num_tokens
        # Composing ahead, each has one step in flight, on a placeholder for the token that it will sample.
        decodes = (
            request.placeholders == ahead
            and request.steps_in_flight == ahead
            and request.stale_steps == 0
            and computed - ahead == tokens - 1
            and computed - ahead >= request.prompt_tokens
        )
        if not decodes:
            return 0
        most = min(most, request.last_token - tokens - 1)
    return most
