"""Step loop of the engine: deliver events, compose a step, run it, repeat it while it would be the same again."""

import math
from collections.abc import Callable

import numpy as np

from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel
from sim.kernels import scheduler as scheduling
from sim.kernels import tiers
from sim.kernels.boundaries import can_cross, cross, forget_due, is_due, note_due
from sim.kernels.compiling import entry_variant, nothing
from sim.kernels.frontend import run_alone, run_beside
from sim.kernels.layout import FINISHED, NONE, OK, SHARED_CORE, Draws, SimState, Timeline
from sim.kernels.requestruns import await_loads, deliver_events, end, hand_over, next_ms, receive
from sim.kernels.scheduler import finish_step, schedule
from sim.kernels.tiers import use_ended
from sim.latency import noise, terms
from tracefile.hashing.splitmix64 import GOLDEN, mix64
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError

DONE, FULL, MORE, NOT_CHAINED = range(4)
"""Reasons to stop: nothing is left to arrive or to compute; the timeline or the arenas of tokens are full; the next
arrivals are needed; a hash occurs at two depths."""
_BEGUN, _IDLED = 4, 5
_ROUNDING = 1.0 + 1e-9
_NORMALS = float(noise.NORMALS)
_GOLDEN = np.uint64(GOLDEN)
_at = kernel(noise.at)
_step_log = kernel(noise.step_log)
_mix64 = kernel(mix64)
_begin_row = kernel(terms.begin_row)
_count_chunk = kernel(terms.count_chunk)
_count_decodes = kernel(terms.count_decodes)
_count_rest = kernel(terms.count_rest)
_is_decode = kernel(terms.is_decode)
_row_ms = kernel(terms.row_ms)
_delivery_ms = kernel(terms.delivery_ms)


def run_state(state: SimState, run_on: Callable[[SimState], int] | None = None) -> SimState:
    """Run until arrivals are needed or to the end; timelines may grow. Raises InputError if hashes are not chained.

    ``run_on``: another loop than ``run_as_needed``.
    """
    while (stop := (run_on or run_as_needed)(state)) == FULL:
        state = state._replace(timeline=Timeline(*(twice_as_long(part) for part in state.timeline)))
    if stop == NOT_CHAINED:
        raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
    return state


def twice_as_long(part: FloatArray) -> FloatArray:
    longer = np.empty((2 * len(part), *part.shape[1:]))
    longer[: len(part)] = part
    return longer


@entry
def run(state: SimState) -> int:
    """Run until there is a reason to stop; after FULL and MORE, call again with what is wanted."""
    clock, ahead = state.clock[0], state.scheduler.settings[0].composes_ahead
    while clock.num_steps + 1 < len(state.timeline.ends_ms):
        if clock.running == NONE:
            stop = _begin_next(state)
            if stop == _IDLED:
                continue
            if stop != _BEGUN:
                return NOT_CHAINED if state.scheduler.pool.counts[0].not_chained else stop
        slot = clock.running
        if not _go_on(state):
            return MORE
        clock.running = NONE
        _hand_out(state, slot)
        if ahead:
            if clock.composed != NONE:
                skip_decodes(state, clock.composed)
        else:
            skip_decodes(state, slot)
    return FULL


@kernel
def _begin_next(state: SimState) -> int:
    """Begin the next step, or move the clock to where there may be one; or return the reason to stop."""
    clock = state.clock[0]
    deliver_events(state)
    if clock.now_ms >= clock.horizon_ms:
        return MORE
    slot = max(clock.composed, 0)
    if clock.composed == NONE and not _compose_first(state, slot):
        if _idle(state):
            return _IDLED
        return DONE if clock.horizon_ms == np.inf else MORE
    clock.composed = slot
    if _may_outlast_horizon(state, slot):
        return MORE
    if not _give_room(state, slot):
        return FULL
    clock.composed = NONE
    if state.scheduler.settings[0].composes_ahead and _compose(state, 1 - slot):
        clock.composed = 1 - slot
    _count(state, slot)
    _begin(state)
    clock.running = slot
    return NOT_CHAINED if state.scheduler.pool.counts[0].not_chained else _BEGUN


@kernel
def _compose_first(state: SimState, slot: int) -> bool:
    """Compose a step while none runs, and again at once if preemptions took all of its shares."""
    preemptions = -1
    while preemptions != state.clock[0].preemptions:
        preemptions = state.clock[0].preemptions
        if _compose(state, slot):
            return True
    return False


@kernel
def _compose(state: SimState, slot: int) -> bool:
    """Compose the next step; False if there is nothing to compute."""
    scheduler = state.scheduler
    if scheduler.state[0].num_running + scheduler.state[0].num_waiting == 0:
        if scheduler.tier.state[0].is_on:
            use_ended(scheduler)  # vLLM takes a step of no requests after the last one's end
        return False
    step, now_ms, tier = scheduler.steps[slot], state.clock[0].now_ms, scheduler.tier.state[0]
    tier.now_ms = now_ms
    schedule(scheduler, slot)
    if tier.is_on:
        await_loads(state)
    state.clock[0].preemptions += step.preempted
    for number in range(step.count - step.admitted, step.count):
        request_run = state.runs[scheduler.shares[slot, number].place]
        if math.isnan(request_run.admitted_ms):
            request_run.admitted_ms = now_ms
    return bool(step.count > 0)


@kernel
def _may_outlast_horizon(state: SimState, slot: int) -> bool:
    """Return whether unknown arrivals may come during the step; they matter on a shared core only."""
    settings = state.scheduler.settings[0]
    if settings.placement != SHARED_CORE or settings.pauses or state.clock[0].horizon_ms == np.inf:
        return False
    _count(state, slot)
    return bool(_latest_end_ms(state) >= state.clock[0].horizon_ms)


@kernel
def _latest_end_ms(state: SimState) -> float:
    """Latest end of the step in the timeline's next row on a shared core, where the API server may double its time."""
    clock = state.clock[0]
    step_ms = clock.slowest_factor * _row_ms(state.costs, state.timeline.rows[clock.num_steps]) + clock.carried_ms
    return float((clock.now_ms + 2.0 * step_ms) * _ROUNDING)


@kernel
def _give_room(state: SimState, slot: int) -> bool:
    """Reserve a part of the arenas of tokens for each request with its first token in the step; False if full."""
    clock, scheduler, end = state.clock[0], state.scheduler, len(state.token_steps)
    for number in range(scheduler.steps[slot].count):
        share = scheduler.shares[slot, number]
        request_run, request = state.runs[share.place], scheduler.requests[share.place]
        if share.samples and request_run.first_token == NONE:
            most = request.last_token - request.prompt_tokens
            if clock.num_tokens + most > end:
                return False
            request_run.first_token = clock.num_tokens
            clock.num_tokens += most
    return True


@kernel
def _hand_out(state: SimState, slot: int) -> None:
    """Hand out the tokens of the step that has ended."""
    scheduler = state.scheduler
    last, shares = state.clock[0].num_steps - 1, scheduler.shares[slot]
    beginning = 0
    for number in range(scheduler.steps[slot].count):
        place = shares[number].place
        if shares[number].samples and scheduler.requests[place].state != FINISHED:
            request_run = state.runs[place]
            if request_run.num_seen == 0:
                beginning += scheduler.requests[place].prompt_tokens
            state.token_steps[request_run.first_token + request_run.num_seen] = last
            request_run.num_seen += 1
    finished = finish_step(scheduler, slot)
    if beginning:
        _deliver(state, beginning)
    for number in range(finished):
        end(state, scheduler.finished[number], OK)


@kernel
def _deliver(state: SimState, prompt_tokens: int) -> None:
    """Delay the tokens of the last step, which holds first tokens of prompts of ``prompt_tokens`` together. On a shared
    core the engine, if it has work, takes half of the core meanwhile."""
    clock, queues = state.clock[0], state.scheduler.state[0]
    work_ms = _delivery_ms(state.costs, prompt_tokens)
    goes_on = clock.composed != NONE or queues.num_running + queues.num_waiting > 0
    shared = goes_on and state.scheduler.settings[0].placement == SHARED_CORE
    clock.carried_ms = work_ms if shared else 0.0
    clock.seen_ms = max(clock.seen_ms, clock.now_ms + work_ms + clock.carried_ms)
    state.timeline.seen_ms[clock.num_steps - 1] = clock.seen_ms


@kernel
def _idle(state: SimState) -> bool:
    """Move the clock, while the engine is idle, to the next event; False if there is none before the horizon."""
    clock = state.clock[0]
    if clock.first_job < clock.last_job:
        start_ms, row = clock.now_ms, state.timeline.rows[clock.num_steps]
        left_ms = state.runs[state.jobs[clock.first_job]].left_ms
        if min(start_ms + left_ms, next_ms(state)) >= clock.horizon_ms:
            return False
        row[:] = 0.0
        run_alone(state, next_ms(state), row)
        _append(state, start_ms)
        hand_over(state)
        return True
    coming_ms = next_ms(state)
    if coming_ms >= clock.horizon_ms:
        return False
    clock.now_ms = max(clock.now_ms, coming_ms)
    return True


@kernel
def _count(state: SimState, slot: int) -> None:
    """Count a composed step in every term, in the timeline's next row (``sim.latency.terms.step_row``)."""
    scheduler = state.scheduler
    requests, shares = scheduler.requests, scheduler.shares[slot]
    clock, decodes, kv_tokens = state.clock[0], 0, 0
    row = state.timeline.rows[clock.num_steps]
    _begin_row(row)
    for number in range(scheduler.steps[slot].count):
        share = shares[number]
        if _is_decode(share.num_tokens, share.depth, requests[share.place].prompt_tokens):
            decodes += 1
            kv_tokens += share.depth
        else:
            _count_chunk(row, share.num_tokens, share.depth)
    _count_decodes(row, decodes, kv_tokens, scheduler.steps[slot].repeated_tokens)
    if scheduler.steps[slot].count:
        _count_rest(row, requests[shares[0].place].arrival_ms - clock.step_end_ms)


@kernel
def _begin(state: SimState) -> None:
    """Begin the step in the timeline's next row."""
    clock, row = state.clock[0], state.timeline.rows[state.clock[0].num_steps]
    start_ms, step_ms = clock.now_ms, _row_ms(state.costs, row)
    clock.start_ms = start_ms
    clock.left_ms = step_ms * _step_factor(state, start_ms, step_ms) + clock.carried_ms
    clock.carried_ms = 0.0


@kernel
def _go_on(state: SimState) -> bool:
    """Move the clock to the step's end, and the API server with it on a shared core; False if the step pauses."""
    clock = state.clock[0]
    if state.scheduler.settings[0].placement == SHARED_CORE:
        clock.left_ms = _share_core(state, clock.left_ms, state.timeline.rows[clock.num_steps])
        if clock.left_ms > 0.0:
            return False
    else:
        clock.now_ms = clock.start_ms + clock.left_ms
    clock.step_end_ms = clock.now_ms
    _append(state, clock.start_ms)
    return True


@kernel
def _step_factor(state: SimState, start_ms: float, step_ms: float) -> float:
    """Factor of the next step, which begins at ``start_ms`` and is predicted to take ``step_ms``."""
    draws, clock = state.draws, state.clock[0]
    if len(draws.step_table) == 0:
        return 1.0
    normal = 0.0
    if len(draws.step_key):
        counter = np.uint64(2) * np.uint64(clock.steps_drawn)
        own = _at(draws.normals, _uniform(draws, counter) * _NORMALS)
        fresh = _at(draws.normals, _uniform(draws, counter + np.uint64(1)) * _NORMALS)
        kept = math.exp(-(start_ms - clock.slow_at_ms) / draws.weights[2])
        clock.slow = kept * clock.slow + math.sqrt(1.0 - kept * kept) * fresh
        clock.slow_at_ms = start_ms
        clock.steps_drawn += 1
        normal = draws.weights[0] * clock.slow + draws.weights[1] * own
    return math.exp(_step_log(draws.step_knots, draws.step_table, normal, step_ms))


@kernel
def _uniform(draws: Draws, counter: np.uint64) -> float:
    drawn = _mix64(draws.step_key[0] + (counter + np.uint64(1)) * _GOLDEN)
    return float(np.float64(np.int64(drawn >> np.uint64(11))) * 2.0**-53)


@kernel
def _share_core(state: SimState, left_ms: float, row: FloatArray) -> float:
    """Run ``left_ms`` of the engine's work beside the API server's work, which ``row`` counts; return the rest."""
    clock = state.clock[0]
    while left_ms > 0.0:
        receive(state)
        until_ms = np.inf
        if clock.num_arrivals:
            until_ms = state.arrivals[0].time_ms
        left_ms = run_beside(state, left_ms, until_ms, row)
        if left_ms > 0.0 and clock.now_ms < until_ms:
            return left_ms
    hand_over(state)
    return left_ms


@kernel
def _append(state: SimState, start_ms: float) -> None:
    clock = state.clock[0]
    state.timeline.starts_ms[clock.num_steps] = start_ms
    state.timeline.ends_ms[clock.num_steps] = clock.now_ms
    clock.seen_ms = max(clock.seen_ms, clock.now_ms)
    state.timeline.seen_ms[clock.num_steps] = clock.seen_ms
    clock.num_steps += 1


@kernel
def skip_decodes(state: SimState, slot: int) -> None:
    """Run, without the scheduler, the steps that would repeat the step in ``slot``: decodes only, none of which ends,
    and no event. A request that was not admitted in it cannot be admitted now: nothing has been freed or queued since,
    or cached that it could hit. Composing ahead, ``slot`` is the step yet to run; else the step that ran.
    """
    scheduler, clock = state.scheduler, state.clock[0]
    step, count = scheduler.steps[slot], scheduler.state[0].num_running
    same = step.preempted == 0 and step.admitted == 0 and step.count == count and step.total_tokens == count
    if count == 0 or not same or not scheduler.state[0].is_quiet:
        return
    most = min(_most_decodes(state), len(state.timeline.ends_ms) - clock.num_steps)
    if most <= 0:
        return
    requests, running, first = scheduler.requests, scheduler.running, clock.num_steps
    kv_tokens = 0
    for position in range(count):
        request = requests[running[position]]
        kv_tokens += request.num_computed - request.placeholders
    skipped = _decode(state, count, kv_tokens, step.repeated_tokens, most)
    for position in range(count):
        place = running[position]
        request, request_run = requests[place], state.runs[place]
        token = request_run.first_token + request_run.num_seen
        for step_number in range(skipped):
            state.token_steps[token + step_number] = first + step_number
        request_run.num_seen += skipped
        request.num_tokens += skipped
        request.num_computed += skipped
        scheduler.shares[slot, position].depth += skipped


@kernel
def _decode(state: SimState, decodes: int, kv_tokens: int, repeated_tokens: int, most: int) -> int:
    """Run up to ``most`` steps of decodes, from one block boundary to the next; return their number."""
    scheduler, clock = state.scheduler, state.clock[0]
    first, done, until = clock.num_steps, 0, 0
    note_due(scheduler)
    while done < most and done == until:
        if is_due(scheduler, done):
            undisturbed = _is_undisturbed(state, decodes, kv_tokens + decodes * done, repeated_tokens)
            if not undisturbed or not can_cross(scheduler, done):
                break
            scheduler.tier.state[0].now_ms = clock.now_ms
            cross(scheduler, done)
        until += 1
        while until < most and not is_due(scheduler, until):
            until += 1
        if scheduler.settings[0].placement == SHARED_CORE:
            _repeat_sharing(state, decodes, kv_tokens + decodes * done, repeated_tokens, first + until)
        else:
            _repeat(state, decodes, kv_tokens + decodes * done, repeated_tokens, first + until)
        done = clock.num_steps - first
    forget_due(scheduler)
    return int(done)


@kernel
def _is_undisturbed(state: SimState, decodes: int, kv_tokens: int, repeated_tokens: int) -> bool:
    """Return whether no event has to be delivered before the next step. On a shared core an arrival does not count."""
    clock = state.clock[0]
    if state.scheduler.settings[0].placement == SHARED_CORE:
        row = state.timeline.rows[clock.num_steps]
        _begin_row(row)
        _count_decodes(row, decodes, kv_tokens, repeated_tokens)
        is_near = clock.horizon_ms < np.inf and _latest_end_ms(state) >= clock.horizon_ms
        return not is_near and bool(clock.num_events == 0 or clock.now_ms < state.events[0].time_ms)
    return bool(clock.now_ms < min(next_ms(state), clock.horizon_ms))


@kernel
def _repeat(state: SimState, decodes: int, kv_tokens: int, repeated_tokens: int, end_step: int) -> None:
    """Run steps in which ``decodes`` requests decode, first on ``kv_tokens``, to ``end_step`` or the next event."""
    timeline, clock = state.timeline, state.clock[0]
    wake_ms = min(next_ms(state), clock.horizon_ms)
    number, now_ms, seen_ms = clock.num_steps, clock.now_ms, clock.seen_ms
    while number < end_step and now_ms < wake_ms:
        row = timeline.rows[number]
        _begin_row(row)
        _count_decodes(row, decodes, kv_tokens, repeated_tokens)
        timeline.starts_ms[number] = now_ms
        step_ms = _row_ms(state.costs, row)
        now_ms = now_ms + step_ms * _step_factor(state, now_ms, step_ms)
        timeline.ends_ms[number] = now_ms
        seen_ms = max(seen_ms, now_ms)
        timeline.seen_ms[number] = seen_ms
        kv_tokens += decodes
        number += 1
    clock.num_steps = number
    clock.now_ms = clock.step_end_ms = now_ms
    clock.seen_ms = seen_ms


@kernel
def _repeat_sharing(state: SimState, decodes: int, kv_tokens: int, repeated_tokens: int, end_step: int) -> None:
    """Run the same steps on a shared core, to ``end_step`` or until the API server hands a request over."""
    clock = state.clock[0]
    while clock.num_steps < end_step and _is_undisturbed(state, decodes, kv_tokens, repeated_tokens):
        _begin(state)
        _go_on(state)
        kv_tokens += decodes


@kernel
def _most_decodes(state: SimState) -> int:
    """Number of steps in which all running requests only decode, and none ends."""
    scheduler = state.scheduler
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


WITHOUT_TIERS = dict.fromkeys(
    (
        await_loads,
        *(scheduling.begin_load, scheduling.publish_loaded, scheduling.take_loaded, scheduling.take_up),
        *(tiers.end_loading, tiers.note_ended, tiers.seek, tiers.store_step, use_ended),
    ),
    nothing,
)
"""Kernels that an engine without memory behind its pool does without."""
run_simple = entry_variant("run_simple", run, WITHOUT_TIERS)
"""The loop of most engines, which compiles in less time than ``run``."""


def run_as_needed(state: SimState) -> int:
    """Run with the simple loop if the engine has no tiers."""
    return (run if state.scheduler.tier.state["is_on"][0] else run_simple)(state)
