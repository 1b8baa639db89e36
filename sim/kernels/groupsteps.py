"""Scheduler and step loop of an engine with several KV groups: the simple engine's, with other functions for the pool.

``run`` and ``run_one_by_one`` compile when they are first called, so that engines with one group never pay for them.
"""

from typing import Any

from measure.machinecode.entries import entry
from measure.machinecode.kernels import kernel
from sim.kernels import loop
from sim.kernels import scheduler as simple
from sim.kernels.compiling import entry_variant, nothing
from sim.kernels.grouplookup import find_alone, look_up
from sim.kernels.groups import NO_PLACE, STATE, GroupPool, release_block
from sim.kernels.grouptables import admit, extend, publish, release
from sim.kernels.layout import RUNNING, Records, record
from sim.kernels.pool import release as release_simply
from sim.kernels.scheduler import count_admission, launch, leave_queue
from sim.kernels.scheduler import schedule as schedule_simply
from sim.vllm import rules, statecache

_blocks_for = kernel(rules.blocks_for)
_state_end = kernel(statecache.state_end)
_stores_inside = kernel(statecache.stores_inside)
PROMPT = record("reach hit_tokens form")
"""A request one at a time: tokens that could hit at most, the hit, −1: it does not fit, and the form of groups with the
shortest hit where more could have been, −1: none."""


@entry
def run_one_by_one(pool: GroupPool, requests: Records, prompts: Records, stops: bool) -> None:
    """Serve requests that come one after another; write what each hits. ``stops``: return at the first eviction."""
    for number in range(len(requests)):
        request, prompt = requests[number], prompts[number]
        prompt.hit_tokens = prompt.form = NO_PLACE
        if not _fits(pool, request):
            continue
        _begin_step(pool)
        hits = look_up(pool, request)
        if hits < prompt.reach:
            prompt.form = _shortest(pool, request)
            look_up(pool, request)
        if _serve(pool, request, hits):
            prompt.hit_tokens = hits
        release(pool, request)
        request.num_tokens = request.prompt_tokens
        if stops and pool.counts[0].evicted_blocks:
            return


@kernel
def _begin_step(pool: GroupPool) -> None:
    pool.rules[0].step += 1


@kernel
def _end_step(pool: GroupPool) -> None:
    """Let go of both ends of the copies that this step makes."""
    last, count = 0, pool.rules[0].copied
    if count == 0:
        return
    for place in range(len(pool.groups)):
        for number in range(count):
            copied = pool.copies[number]
            if copied.group == place:
                last = release_block(pool.cache, pool.counts[0], copied.source, last)
                last = release_block(pool.cache, pool.counts[0], copied.target, last)
    pool.rules[0].copied = 0


@kernel
def _fits(pool: GroupPool, request: Any) -> bool:
    settings, last = pool.settings[0], request.last_token
    return bool(last <= settings.max_tokens and most_blocks(pool, last - 1) <= settings.usable_blocks)


@kernel
def _shortest(pool: GroupPool, request: Any) -> int:
    """Return the form of groups whose hit alone is the shortest."""
    shortest = 0
    for number in range(len(pool.forms)):
        find_alone(pool, request, number)
        if pool.forms[number].tokens < pool.forms[shortest].tokens:
            shortest = number
    return shortest


@kernel
def _serve(pool: GroupPool, request: Any, hits: int) -> bool:
    at = hits
    while at < request.last_token - 1:
        end = _step_end(pool, request, at)
        request.num_computed = at
        if not (extend(pool, request, end) if request.first_hold else admit(pool, request, end - at)):
            return False
        at = end
        _end_step(pool)
        _begin_step(pool)
    return True


@kernel
def _step_end(pool: GroupPool, request: Any, at: int) -> int:
    most = pool.settings[0].max_num_batched_tokens
    if at < request.prompt_tokens:
        shared = pool.rules[0].shared_tokens
        return at + clip(pool, request, at, min(request.prompt_tokens - at, most), shared)
    # Between two match units decoding changes nothing; the last step frees what the window has left.
    unit, last = pool.settings[0].block_size, request.last_token - 1
    request.num_tokens = min((at // unit + 1) * unit, last if at == last - 1 else last - 1)
    return int(request.num_tokens)


@kernel
def most_blocks(pool: GroupPool, tokens: int) -> int:
    """Blocks that a request of ``tokens`` holds at most at a time."""
    blocks = 0
    for place in range(len(pool.groups)):
        group = pool.groups[place]
        own = _blocks_for(tokens, group.block_size)
        if group.kind == STATE:
            own = min(own, 2) + pool.rules[0].partial_hits + group.inside
        elif group.most != NO_PLACE:
            own = min(own, group.most)
        blocks += own
    return int(blocks)


@kernel
def clip(pool: GroupPool, request: Any, start: int, tokens: int, shared: int) -> int:
    """Let a chunk of the prompt end at a block, before the last state worth keeping, or at it."""
    told, settings, end = pool.rules[0], pool.settings[0], start + tokens
    prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
    if not told.clips or start >= prefill_end:
        return tokens
    size, unit, drops = told.state_block, settings.block_size, told.drops
    kept = unit if told.partial_hits else size
    checkpoint = _state_end(prefill_end, kept, drops)
    inside = bool(told.stores_inside) and end >= prefill_end
    inside = inside and _stores_inside(start, end, checkpoint, unit, size)
    last = 0 if inside else _state_end(request.num_tokens, size, drops)
    if end < prefill_end:
        whole = end // size * size
        if whole > start or size <= settings.max_num_batched_tokens:
            end = whole
    stop = end
    if start < last < stop:
        stop = last
    if start % size and not inside and (start // size + 1) * size < stop:
        stop = (start // size + 1) * size
    if told.partial_hits and not inside:
        tail = _state_end(request.prompt_tokens, unit, drops)
        if last < tail < request.prompt_tokens and start < tail < stop:
            stop = tail
    if start < shared < end:
        boundary = start + (shared - start) // size * size
        if start < boundary < stop:
            stop = boundary
    return int(max(stop - start, 0))


@kernel
def _accepts(scheduler: Any, place: int) -> bool:
    return _fits(scheduler.pool, scheduler.requests[place])


@kernel
def _schedule(scheduler: Any, slot: int) -> None:
    _begin_step(scheduler.pool)
    schedule_simply(scheduler, slot)
    _end_step(scheduler.pool)
    scheduler.state[0].is_quiet = 0  # each step is composed: what is freed outside a window may let a request in


@kernel
def _admit_waiting(scheduler: Any, slot: int) -> None:
    requests, state, pool, step = scheduler.requests, scheduler.state[0], scheduler.pool, scheduler.steps[slot]
    settings, end = scheduler.settings[0], len(requests) - 1
    budget, following = settings.max_num_batched_tokens - step.total_tokens, requests[end].next_waiting
    while following != end and budget > 0 and state.num_running < settings.max_num_seqs:
        place = following
        request = requests[place]
        following = request.next_waiting
        if request.stale_steps > 0:
            continue  # a token of before its preemption is still to come; the next in line may go first
        hits = look_up(pool, request)
        tokens = min(request.num_tokens - hits, budget)
        tokens = clip(pool, request, hits, tokens, pool.rules[0].shared_tokens)
        if tokens == 0 or not admit(pool, request, tokens):
            break
        leave_queue(scheduler, place)
        scheduler.running[state.num_running] = place
        state.num_running += 1
        count_admission(scheduler, place, hits)
        request.num_computed = hits
        request.state = RUNNING
        step.admitted += 1
        launch(request, step, scheduler.shares[slot, step.count], place, tokens)
        budget -= tokens


@kernel
def _clip(scheduler: Any, place: int, tokens: int) -> int:
    request = scheduler.requests[place]
    shared = scheduler.pool.rows[request.first_hold].shared_tokens
    return clip(scheduler.pool, request, request.num_computed, tokens, shared)


@kernel
def _extend(scheduler: Any, place: int, end: int) -> bool:
    return extend(scheduler.pool, scheduler.requests[place], end)


@kernel
def _publish(scheduler: Any, place: int, end: int) -> None:
    publish(scheduler.pool, scheduler.requests[place], end)


REPLACED = {
    **loop.WITHOUT_TIERS,
    simple.accepts: _accepts,
    simple.schedule: _schedule,
    simple.clip: _clip,
    simple.admit_waiting: _admit_waiting,
    simple.extend: _extend,
    simple.publish_known: _publish,
    release_simply: release,
    simple.count_hashed: nothing,
    loop.skip_decodes: nothing,
}
"""Without tiers, and without steps that need no composing."""
run = entry_variant("run_groups", loop.run, REPLACED, __name__)
