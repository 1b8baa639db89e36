"""The scheduler's rules, as in ``sim.vllm.scheduler``; a step is a slot of ``shares``.

``is_quiet`` says that nothing has happened since the last step was composed that could let the queue's head in: the
step loop may then repeat that step without composing it. What is called for every request in every step gets only the
arrays that it needs: handing over all of them takes longer than the work.
"""

from typing import Any

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels.layout import FINISHED, LOADING, RUNNING, WAITING, Scheduler
from sim.kernels.pool import hold, lookup, publish, release, take
from sim.kernels.tiers import (
    WAIT,
    end_loading,
    load,
    note_ended,
    reserved_blocks,
    seek,
    store_step,
    use_ended,
)
from sim.vllm import rules

_lookup_limit = kernel(rules.lookup_limit)
_blocks_for = kernel(rules.blocks_for)
_blocks_needed = kernel(rules.blocks_needed)


@kernel
def accepts(scheduler: Scheduler, place: int) -> bool:
    settings, last_token = scheduler.settings[0], scheduler.requests[place].last_token
    blocks = _blocks_for(last_token - 1, settings.block_size)
    return bool(last_token <= settings.max_tokens and blocks <= settings.usable_blocks)


@kernel
def add(scheduler: Scheduler, place: int) -> None:
    request = scheduler.requests[place]
    request.state = WAITING
    _queue(scheduler, place, scheduler.requests[len(scheduler.requests) - 1].previous_waiting)
    count_hashed(scheduler, place, 0)
    scheduler.state[0].is_quiet = 0


@kernel
def schedule(scheduler: Scheduler, slot: int) -> None:
    step, state, settings = scheduler.steps[slot], scheduler.state[0], scheduler.settings[0]
    step.count = 0
    step.total_tokens = 0
    step.admitted = 0
    step.preempted = 0
    _schedule_running(scheduler, slot)
    state.is_quiet = 1
    if step.preempted == 0 and state.num_waiting > 0:
        admit_waiting(scheduler, slot)
    step.repeated_tokens = scheduler.pool.counts[0].num_repeated * settings.block_size
    if scheduler.tier.state[0].is_on:
        store_step(scheduler, slot)
        use_ended(scheduler)


@kernel
def finish_step(scheduler: Scheduler, slot: int) -> int:
    """Hand out the tokens that the step sampled; write the places that this finished to ``finished``; how many."""
    requests, shares, finished = scheduler.requests, scheduler.shares[slot], 0
    for number in range(scheduler.steps[slot].count):
        place = shares[number].place
        request = requests[place]
        request.steps_in_flight -= 1
        stale = request.stale_steps > 0
        if stale:
            request.stale_steps -= 1
            scheduler.state[0].is_quiet = 0
        if not shares[number].samples or request.state == FINISHED:
            continue
        request.num_tokens += 1
        if not stale:
            request.placeholders -= 1
            if request.num_computed - request.placeholders >= request.next_full:
                publish_known(scheduler, place, request.num_computed - request.placeholders)
        if request.num_tokens == request.last_token:
            if request.state == WAITING:  # its last token came from a step scheduled before its preemption
                leave_queue(scheduler, place)
            _retire(scheduler, place)
            scheduler.finished[finished] = place
            finished += 1
    if finished:
        drop_finished(scheduler)
    return finished


@kernel
def abort(scheduler: Scheduler, place: int) -> None:
    """Take a request out that is not finished, its blocks freed at once, whatever it was doing."""
    was_running = scheduler.requests[place].state == RUNNING
    if scheduler.requests[place].state == LOADING:
        end_loading(scheduler.tier, place)
    elif not was_running:
        leave_queue(scheduler, place)
    _retire(scheduler, place)
    if was_running:
        drop_finished(scheduler)


@kernel
def drop_finished(scheduler: Scheduler) -> None:
    running, state, kept = scheduler.running, scheduler.state[0], 0
    for position in range(state.num_running):
        place = running[position]
        if scheduler.requests[place].state != FINISHED:
            running[kept] = place
            kept += 1
    state.num_running = kept


@kernel
def _schedule_running(scheduler: Scheduler, slot: int) -> None:
    requests, running, state, step = scheduler.requests, scheduler.running, scheduler.state[0], scheduler.steps[slot]
    position, budget = 0, scheduler.settings[0].max_num_batched_tokens
    while position < state.num_running and budget > 0:
        place = running[position]
        request = requests[place]
        position += 1
        placeholders, computed = request.placeholders, request.num_computed
        if placeholders and computed + 2 - placeholders >= request.last_token:
            continue  # its last token is on its way
        tokens = request.num_tokens + placeholders - computed
        if tokens == 0:
            continue
        if tokens > 1:
            tokens = clip(scheduler, place, min(tokens, budget))
            if tokens == 0:
                continue
        end = computed + tokens
        within_block = end <= request.room_tokens and end < request.next_full
        if not within_block and not _make_room(scheduler, place, end, slot):
            break
        launch(request, step, scheduler.shares[slot, step.count], place, tokens)
        budget -= tokens


@kernel
def clip(scheduler: Scheduler, place: int, tokens: int) -> int:
    """Return as many of ``tokens`` as one chunk of a prompt may have; with one KV group any end will do."""
    return tokens


@kernel
def admit_waiting(scheduler: Scheduler, slot: int) -> None:
    requests, state, pool, step = scheduler.requests, scheduler.state[0], scheduler.pool, scheduler.steps[slot]
    tier = scheduler.tier.state[0]
    block_size = scheduler.settings[0].block_size
    budget = scheduler.settings[0].max_num_batched_tokens - step.total_tokens
    end = len(requests) - 1
    following = requests[end].next_waiting
    while following != end and budget > 0 and state.num_running < scheduler.settings[0].max_num_seqs:
        place = following
        request = requests[place]
        following = request.next_waiting
        if request.stale_steps > 0:
            continue  # a token of before its preemption is still to come; the next in line may go first
        loaded, hits, idle = request.num_blocks > 0, request.num_blocks, 0
        tokens = request.num_tokens - request.num_computed
        if loaded:
            publish_loaded(scheduler, place)
        else:
            most_hits = _lookup_limit(request.num_tokens, block_size, request.prompt_logprobs)
            hits, idle = lookup(pool, request, most_hits)
            if tier.is_on:
                end_of_load = seek(scheduler, place, hits)
                if end_of_load == WAIT:
                    continue
                if end_of_load > hits:
                    if not begin_load(scheduler, place, hits, idle, end_of_load):
                        break
                    continue
            tokens = request.num_tokens - hits * block_size
        tokens = min(tokens, budget)
        blocks = _blocks_for(request.num_tokens, block_size)
        if _blocks_needed(blocks, hits, idle) > pool.counts[0].num_free:
            break
        leave_queue(scheduler, place)
        scheduler.running[state.num_running] = place
        state.num_running += 1
        if not loaded:
            _adopt(scheduler, place, hits, idle)
        request.state = RUNNING
        extend(scheduler, place, request.num_computed + tokens)
        step.admitted += 1
        launch(request, step, scheduler.shares[slot, step.count], place, tokens)
        budget -= tokens


@kernel
def begin_load(scheduler: Scheduler, place: int, hits: int, idle: int, end: int) -> bool:
    """Let a request wait for its blocks up to ``end`` from a tier; False: the pool has no room for them."""
    stay_apart()
    num_free, request = scheduler.pool.counts[0].num_free, scheduler.requests[place]
    if _blocks_needed(_blocks_for(request.num_tokens, scheduler.settings[0].block_size), hits, idle) > num_free:
        return False
    if _blocks_needed(end, hits, idle) > num_free - reserved_blocks(scheduler):
        return False
    leave_queue(scheduler, place)
    _adopt(scheduler, place, hits, idle)
    own, tier = scheduler.tier.requests[place], scheduler.tier.state[0]
    own.done_ms, own.next, own.noted = take_loaded(scheduler, place, end), tier.first_loading, 0
    tier.first_loading = place
    request.state = LOADING
    return True


@kernel
def take_loaded(scheduler: Scheduler, place: int, end: int) -> float:
    """Give an adopted request room for blocks up to ``end`` from a tier; return the time at which they are there."""
    request, block_size = scheduler.requests[place], scheduler.settings[0].block_size
    hits = request.num_blocks
    done_ms = load(scheduler, place, hits, end)  # first: blocks in transit are not displaced by what is stored
    take(scheduler.pool, end - hits)
    request.num_blocks = end
    request.room_tokens = end * block_size
    request.num_computed = min(end * block_size, request.num_tokens - 1)
    if request.preemptions == 0:
        request.cached_tokens = min(end * block_size, request.num_tokens)
    return done_ms


@kernel
def publish_loaded(scheduler: Scheduler, place: int) -> None:
    request = scheduler.requests[place]
    full = min(request.num_blocks, request.num_tokens // scheduler.settings[0].block_size)
    if full > request.num_hashed:
        publish(scheduler.pool, request, request.num_hashed, full)
        count_hashed(scheduler, place, full)


@kernel
def take_up(scheduler: Scheduler, place: int) -> None:
    """Queue a request whose blocks have come from a tier: before all that hold none, after those that do."""
    end_loading(scheduler.tier, place)
    scheduler.requests[place].state = WAITING
    _queue(scheduler, place, _last_holder(scheduler))
    scheduler.state[0].is_quiet = 0


@kernel
def _last_holder(scheduler: Scheduler) -> int:
    """Return the last of those at the front of the line that hold blocks from a tier; its end, if none does."""
    requests, place = scheduler.requests, len(scheduler.requests) - 1
    while requests[requests[place].next_waiting].num_blocks > 0:
        place = requests[place].next_waiting
    return place


@kernel
def _make_room(scheduler: Scheduler, place: int, end: int, slot: int) -> bool:
    while not extend(scheduler, place, end):
        state, running = scheduler.state[0], scheduler.running
        state.num_running -= 1
        victim = running[state.num_running]
        _preempt(scheduler, victim)
        scheduler.steps[slot].preempted += 1
        if victim == place:
            return False
    return True


@kernel
def _adopt(scheduler: Scheduler, place: int, hits: int, idle: int) -> None:
    """Give a request its hits, ``idle`` of them without a holder; chained hashes are held as they were looked up."""
    request, block_size, counts = scheduler.requests[place], scheduler.settings[0].block_size, scheduler.pool.counts[0]
    num_free = counts.num_free
    held = hold(scheduler.pool, request, hits)
    if held < hits or num_free - counts.num_free != idle:
        counts.not_chained = 1
    hit_tokens = hits * block_size
    count_admission(scheduler, place, hit_tokens)
    request.num_blocks = hits
    request.num_computed = hit_tokens
    request.room_tokens = hit_tokens
    count_hashed(scheduler, place, hits)


@kernel
def count_admission(scheduler: Scheduler, place: int, hit_tokens: int) -> None:
    stats, request = scheduler.stats[0], scheduler.requests[place]
    if request.cached_tokens < 0:
        request.cached_tokens = hit_tokens
    caches = scheduler.settings[0].enable_prefix_caching and not request.prompt_logprobs
    if caches and request.preemptions == 0:
        stats.requests += 1
        stats.query_tokens += request.num_tokens
        stats.hit_tokens += hit_tokens


@kernel
def extend(scheduler: Scheduler, place: int, end: int) -> bool:
    request, pool, block_size = scheduler.requests[place], scheduler.pool, scheduler.settings[0].block_size
    lacking = _blocks_for(end, block_size) - request.num_blocks
    if lacking > 0:
        if lacking > pool.counts[0].num_free:
            return False
        take(pool, lacking)
        request.num_blocks += lacking
        request.room_tokens += lacking * block_size
    known = min(end, request.num_tokens)
    if known >= request.next_full:
        publish_known(scheduler, place, known)
    return True


@kernel
def publish_known(scheduler: Scheduler, place: int, end: int) -> None:
    request = scheduler.requests[place]
    full = end // scheduler.settings[0].block_size
    publish(scheduler.pool, request, request.num_hashed, full)
    if request.num_hashed < request.known_keys:  # no other request can hit private blocks
        scheduler.state[0].is_quiet = 0
    count_hashed(scheduler, place, full)


@kernel
def count_hashed(scheduler: Scheduler, place: int, blocks: int) -> None:
    request = scheduler.requests[place]
    request.num_hashed = blocks
    request.next_full = (blocks + 1) * scheduler.settings[0].block_size


@kernel
def launch(request: Any, step: Any, share: Any, place: int, tokens: int) -> None:
    share.place = place
    share.num_tokens = tokens
    share.depth = request.num_computed
    request.num_computed += tokens
    samples = request.num_computed >= request.num_tokens + request.placeholders
    share.samples = samples
    if samples:
        request.placeholders += 1
    request.steps_in_flight += 1
    step.count += 1
    step.total_tokens += tokens


@kernel
def _preempt(scheduler: Scheduler, place: int) -> None:
    request = scheduler.requests[place]
    _give_back(scheduler, place)
    request.state = WAITING
    request.stale_steps = request.steps_in_flight
    request.preemptions += 1
    _queue(scheduler, place, _last_holder(scheduler))


@kernel
def _retire(scheduler: Scheduler, place: int) -> None:
    _give_back(scheduler, place)
    if scheduler.tier.state[0].is_on:
        note_ended(scheduler.tier, place)
    scheduler.requests[place].state = FINISHED
    scheduler.state[0].is_quiet = 0


@kernel
def _give_back(scheduler: Scheduler, place: int) -> None:
    request = scheduler.requests[place]
    release(scheduler.pool, request)
    request.num_blocks = 0
    request.room_tokens = 0
    request.num_computed = 0
    request.placeholders = 0
    count_hashed(scheduler, place, 0)


@kernel
def _queue(scheduler: Scheduler, place: int, before: int) -> None:
    """Let a request wait after ``before``."""
    requests = scheduler.requests
    after = requests[before].next_waiting
    requests[before].next_waiting = place
    requests[place].previous_waiting = before
    requests[place].next_waiting = after
    requests[after].previous_waiting = place
    scheduler.state[0].num_waiting += 1


@kernel
def leave_queue(scheduler: Scheduler, place: int) -> None:
    requests = scheduler.requests
    before, after = requests[place].previous_waiting, requests[place].next_waiting
    requests[before].next_waiting = after
    requests[after].previous_waiting = before
    scheduler.state[0].num_waiting -= 1
