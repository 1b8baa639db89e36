"""Blocks of requests in several KV groups: taken, freed outside the window, copied and cached.

The rules are those of ``sim.vllm.hybrid``, ``groupcache`` and ``statecache``, function by function, compiled.
"""

from typing import Any

import numpy as np

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels.groups import (
    CHUNK,
    FULL,
    NO_PLACE,
    STATE,
    WINDOW,
    GroupPool,
    add_key,
    add_partial,
    first_in_line,
    forget,
    forget_first_key,
    hold_block,
    key_at,
    note_state,
    release_range,
    take_block,
)
from sim.kernels.pool import NONE
from sim.vllm import rules, statecache

_blocks_for = kernel(rules.blocks_for)
_state_end = kernel(statecache.state_end)
_stores_inside = kernel(statecache.stores_inside)


@kernel
def admit(pool: GroupPool, request: Any, tokens: int) -> bool:
    """Give a request the hits of the last lookup and blocks for ``tokens`` more, if all of it fits now; else change
    nothing."""
    counts, told, groups = pool.counts[0], pool.rules[0], pool.groups
    row, computed = counts.free_hold, told.hit_tokens
    if row == NONE:
        row = counts.num_holds + 1
    for held in range(row * len(groups), (row + 1) * len(groups)):
        table = pool.tables[held]
        table.count = table.allocated = table.retired = 0
        table.num_cached = table.partial = table.last_state = table.checkpoint = NO_PLACE
    whole = min(request.num_tokens, told.max_model_len)
    if _needs(pool, request, row, computed, whole, True, True) > counts.num_free:
        return False
    if _needs(pool, request, row, computed, computed + tokens, True, False) > counts.num_free:
        return False
    if row > counts.num_holds:
        counts.num_holds = row
    else:
        counts.free_hold = pool.rows[row].next
    request.first_hold = row
    pool.rows[row].shared_tokens = told.shared_tokens
    is_hit = False
    for number in range(len(pool.forms)):
        is_hit = is_hit or pool.forms[number].count > 0
    if is_hit:
        for place in range(len(groups)):
            _adopt(pool, row * len(groups) + place, place, computed)
    _grow(pool, request, row, computed, computed + tokens)
    return True


@kernel
def extend(pool: GroupPool, request: Any, end: int) -> bool:
    """Free what attention has passed, and take blocks for tokens up to ``end``; False if they are not free."""
    stay_apart()
    row, groups = request.first_hold, pool.groups
    computed = request.num_computed
    passed = max(0, computed - (pool.rows[row].launched if request.steps_in_flight else 0))
    for place in range(len(groups)):
        _free_skipped(pool, row * len(groups) + place, place, passed)
    if _needs(pool, request, row, computed, end, False, False) > pool.counts[0].num_free:
        return False
    _grow(pool, request, row, computed, end)
    return True


@kernel
def release(pool: GroupPool, request: Any) -> None:
    stay_apart()
    row, groups = request.first_hold, pool.groups
    if row == NONE:
        return
    for place in range(len(groups)):
        held = row * len(groups) + place
        release_range(pool, held, 0, pool.tables[held].count)
    pool.rows[row].next = pool.counts[0].free_hold
    pool.counts[0].free_hold = row
    request.first_hold = NONE


@kernel
def publish(pool: GroupPool, request: Any, tokens: int) -> None:
    """Cache what the known ``tokens`` of a request fill."""
    stay_apart()
    if not pool.settings[0].enable_prefix_caching:
        return
    told, groups = pool.rules[0], pool.groups
    for place in range(len(groups)):
        group, held = groups[place], request.first_hold * len(groups) + place
        whole = tokens
        if len(groups) > 1:
            if not told.partial_hits:
                whole = tokens // told.block_size * told.block_size
            if group.drops and whole:
                whole = min(tokens, whole + group.block_size)
        before = max(pool.tables[held].num_cached, 0)
        _publish_full(pool, request, held, place, whole)
        if group.kind == FULL and group.block_size != pool.settings[0].block_size:
            _publish_tail(pool, request, held, place, whole)
        elif group.kind == STATE:
            full = min(pool.tables[held].num_cached, pool.tables[held].count)
            _publish_state(pool, request, held, place, whole)
            for at in range(before, full):
                _note_first_key(pool, pool.places[held, at])


@kernel
def _skipped_tokens(group: Any, computed: int) -> int:
    """Leading tokens that attention needs no more when ``computed`` are there."""
    if group.kind == WINDOW:
        return int(max(0, computed - group.span + 1))
    if group.kind == CHUNK:
        return int(computed // group.span * group.span)
    return computed - 1 if group.kind == STATE else 0


@kernel
def _needs(  # noqa: PLR0917 - one for each of the readable rule's
    pool: GroupPool, request: Any, row: int, computed: int, end: int, hits: bool, capped: bool
) -> int:
    """Free blocks used up by tokens up to ``end``; ``hits``: with those of the last lookup."""
    stay_apart()
    prefill_end, needed = 0, 0
    if pool.rules[0].retain == 0:
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
    for place in range(len(pool.groups)):
        held = row * len(pool.groups) + place
        if pool.groups[place].kind == STATE:
            needed += _needs_states(pool, held, place, computed, end, prefill_end, hits, capped)
        else:
            needed += _needs_blocks(pool, held, place, computed, end, hits, capped)
    return needed


@kernel
def _needs_blocks(  # noqa: PLR0917 - one for each of the readable rule's
    pool: GroupPool, held: int, place: int, computed: int, end: int, hits: bool, capped: bool
) -> int:
    group, table = pool.groups[place], pool.tables[held]
    required, count = _blocks_for(end, group.block_size), 0
    if capped and group.most != NO_PLACE:
        required = min(required, group.most)
    if table.num_cached != NO_PLACE:
        return int(max(required - table.count, 0))
    skipped = _skipped_tokens(group, computed) // group.block_size
    if hits:
        count = pool.forms[group.form].count
    new = max(required - max(skipped, count + table.count), 0)
    copied = count > 0 and computed % group.block_size != 0
    return int(new + _count_idle(pool, place, max(0, skipped - table.count), count) + copied)


@kernel
def _count_idle(pool: GroupPool, place: int, first: int, count: int) -> int:
    """Count blocks of the last lookup, from place ``first`` to ``count``, that nobody holds."""
    idle = 0
    for at in range(max(first, pool.forms[pool.groups[place].form].start), count):
        idle += pool.cache.blocks[pool.places[place, at]].references == 0
    return idle


@kernel
def _needs_states(  # noqa: PLR0917 - one for each of the readable rule's
    pool: GroupPool, held: int, place: int, computed: int, end: int, prefill_end: int, hits: bool, capped: bool
) -> int:
    group, table, told = pool.groups[place], pool.tables[held], pool.rules[0]
    count = pool.forms[group.form].count if hits else 0
    if count:
        entry = pool.cache.entries[pool.cache.blocks[pool.places[place, count - 1]].entry]
        if pool.cache.entries[first_in_line(pool.cache, entry.tag, np.uint64(entry.key))].step == told.step:
            return len(pool.cache.blocks) + 1
    new = _blocks_for(end, group.block_size) - count - table.count
    copied = (count > 0 and computed % group.block_size != 0) or table.partial != NO_PLACE
    if copied:
        new = max(new, 0) + 1
    unit, tokens = pool.settings[0].block_size, _state_end(end, told.alignment, told.drops)
    at = _blocks_for(end, group.block_size) - 2
    inside = bool(group.inside and end >= prefill_end and tokens > 0 and at >= 0)
    inside = inside and (at >= table.count or pool.places[held, at] == NONE)
    inside = inside and _stores_inside(computed, end, tokens, unit, group.block_size)
    if not capped:
        table.checkpoint, table.checkpoint_place = tokens if inside else NO_PLACE, at
    if new > 0:
        new = min(new, 1 + copied + inside)
    return int(new + _count_idle(pool, place, 0, count))


@kernel
def _adopt(pool: GroupPool, held: int, place: int, computed: int) -> None:
    """Hold the hits of the last lookup for a request that begins with ``computed`` tokens."""
    group, table = pool.groups[place], pool.tables[held]
    form, places = pool.forms[group.form], pool.places
    skipped = _skipped_tokens(group, computed) // group.block_size
    table.count = table.num_cached = max(skipped, form.count)
    for at in range(table.count):
        places[held, at] = NONE
    for at in range(max(skipped, form.start), form.count):
        places[held, at] = pool.places[place, at]
        hold_block(pool.cache, pool.counts[0], places[held, at])
    if form.count > skipped and computed % group.block_size:
        table.num_cached = table.partial = computed // group.block_size
        table.source = places[held, form.count - 1]


@kernel
def _grow(pool: GroupPool, request: Any, row: int, computed: int, end: int) -> None:
    """Take blocks for tokens up to ``end``, which are free, and cache what is full."""
    stay_apart()
    pool.rows[row].launched = end - computed
    for place in range(len(pool.groups)):
        held = row * len(pool.groups) + place
        group, table = pool.groups[place], pool.tables[held]
        if group.kind == STATE:
            _grow_states(pool, held, place, _blocks_for(end, group.block_size))
            continue
        if table.partial != NO_PLACE:
            _copy_partial(pool, held, place, take_block(pool.cache, pool.counts[0]))
        required = _blocks_for(end, group.block_size)
        while table.count < required:
            _append(pool, held, take_block(pool.cache, pool.counts[0]))
    publish(pool, request, min(end, request.num_tokens))


@kernel
def _append(pool: GroupPool, held: int, block: int) -> None:
    pool.places[held, pool.tables[held].count] = block
    pool.tables[held].count += 1


@kernel
def _note_copy(pool: GroupPool, place: int, source: int, copy: int) -> None:
    told = pool.rules[0]
    copied = pool.copies[told.copied]
    copied.group, copied.source, copied.target = place, source, copy
    told.copied += 1


@kernel
def _copy_partial(pool: GroupPool, held: int, place: int, copy: int) -> None:
    """Replace the shared block that the hit ends in by ``copy``; both stay held until the step is composed."""
    table = pool.tables[held]
    pool.places[held, table.partial] = copy
    table.partial = NO_PLACE
    _note_copy(pool, place, table.source, copy)
    hold_block(pool.cache, pool.counts[0], copy)


@kernel
def _grow_states(pool: GroupPool, held: int, place: int, required: int) -> None:
    table, copy = pool.tables[held], NONE
    before, inside, had = table.count, table.checkpoint != NO_PLACE, table.allocated
    table.allocated = 1
    if required <= before and table.partial == NO_PLACE and not inside:
        return
    if before:
        table.last_state = before - 1
    while table.count < required - 1 - inside:
        _append(pool, held, NONE)
    if table.partial != NO_PLACE:
        copy = take_block(pool.cache, pool.counts[0])
    while table.count < required:
        _append(pool, held, take_block(pool.cache, pool.counts[0]))
    if copy != NONE and had:
        _keep_copy(pool, held, place, copy)
    elif copy != NONE:
        _copy_partial(pool, held, place, copy)


@kernel
def _keep_copy(pool: GroupPool, held: int, place: int, copy: int) -> None:
    """Let the cache have ``copy`` of the state that the request goes on writing."""
    table, entries = pool.tables[held], pool.cache.entries
    source = table.source
    table.partial = NO_PLACE
    while pool.cache.blocks[source].entry != NONE:
        tag, key = entries[pool.cache.blocks[source].entry].tag, np.uint64(entries[pool.cache.blocks[source].entry].key)
        step = entries[first_in_line(pool.cache, tag, key)].step
        forget_first_key(pool.cache, pool.counts[0], source)
        add_key(pool.cache, pool.counts[0], copy, tag, key)
        entries[first_in_line(pool.cache, tag, key)].step = step
    pool.cache.blocks[copy].tokens = pool.cache.blocks[source].tokens
    _note_copy(pool, place, source, copy)
    hold_block(pool.cache, pool.counts[0], source)
    _note_first_key(pool, copy)


@kernel
def _note_first_key(pool: GroupPool, block: int) -> None:
    number = pool.cache.blocks[block].entry
    if number != NONE:
        note_state(
            pool.cache, pool.rules[0].step, pool.cache.entries[number].tag, np.uint64(pool.cache.entries[number].key)
        )


@kernel
def _free_skipped(pool: GroupPool, held: int, place: int, computed: int) -> None:
    """Free the blocks that attention needs no more."""
    group, table, places = pool.groups[place], pool.tables[held], pool.places
    skipped = _skipped_tokens(group, computed)
    end = min(skipped // group.block_size, table.count)
    if group.kind == STATE:
        if skipped > 0 and table.retired < end:
            release_range(pool, held, table.retired, end)
            table.retired = end
        last = table.last_state
        if last != NO_PLACE and last < _blocks_for(computed, group.block_size) - 1:
            release_range(pool, held, last, last + 1)
    elif skipped > 0:
        first = end
        while first > 0 and places[held, first - 1] != NONE:
            first -= 1
        release_range(pool, held, first, end)


@kernel
def _publish_full(pool: GroupPool, request: Any, held: int, place: int, tokens: int) -> None:
    group, table = pool.groups[place], pool.tables[held]
    done, full = max(table.num_cached, 0), tokens // group.block_size
    if done >= full:
        return
    scale = group.block_size // pool.settings[0].block_size
    for at in range(done, full):
        block = pool.places[held, at]
        if block != NONE and _is_wanted(pool, request, place, at):
            forget(pool.cache, pool.counts[0], block)  # of a prefix that ended inside it
            tag, key = key_at(pool, request, place, (at + 1) * scale)
            add_key(pool.cache, pool.counts[0], block, tag, key)
            pool.cache.blocks[block].tokens = (at + 1) * group.block_size
    table.num_cached = full


@kernel
def _is_wanted(pool: GroupPool, request: Any, place: int, at: int) -> bool:
    """Return whether a block is worth caching: a later request can go on behind it."""
    group, told = pool.groups[place], pool.rules[0]
    size, retain = group.block_size, told.retain
    if group.kind == STATE:
        if retain == NO_PLACE or 0 < retain <= size or (retain and (at + 1) % (retain // size) == 0):
            return True
        needed, shift = 1, 0
    elif group.kind == WINDOW and told.alignment % size == 0:
        needed, shift = _blocks_for(group.span - 1, size) + group.drops, int(group.drops)
        if retain != 0:
            period = (told.alignment if retain == NO_PLACE else retain) // size
            if needed >= period or (at >= shift and (at - shift) % period >= period - needed):
                return True
            if retain == NO_PLACE:
                return False
    else:
        return True
    shared = pool.rows[request.first_hold].shared_tokens
    for number in range(3):
        boundary = _reachable(told, request.prompt_tokens, shared, number)
        end = boundary // told.alignment * told.alignment // size + shift
        if end - needed <= at < end:
            return True
    return False


@kernel
def _reachable(told: Any, tokens: int, shared: int, number: int) -> int:
    """Tokens at which a request that repeats or continues the prompt can go on, and the end of a shared prefix."""
    if number == 2 and shared:
        return shared
    if not told.drops:
        return tokens - 1
    return int(max((tokens - (number != 1)) // told.block_size * told.block_size - told.block_size, 0))


@kernel
def _publish_tail(pool: GroupPool, request: Any, held: int, place: int, tokens: int) -> None:
    """Cache where the prompt ends inside a block, to the match unit."""
    group, unit = pool.groups[place], pool.settings[0].block_size
    end = (request.prompt_tokens - (0 if group.drops else 1)) // unit * unit
    at = end // group.block_size
    if 0 < end <= tokens and end % group.block_size and at < pool.tables[held].count:
        tag, key = key_at(pool, request, place, end // unit)
        add_partial(pool.cache, pool.counts[0], pool.places[held, at], tag, key, end)


@kernel
def _publish_state(pool: GroupPool, request: Any, held: int, place: int, tokens: int) -> None:
    """Cache the state that was stored inside the step, or at its end if the prompt's last one is there."""
    table, told, unit = pool.tables[held], pool.rules[0], pool.settings[0].block_size
    size = pool.groups[place].block_size
    if table.checkpoint != NO_PLACE:
        end, block = table.checkpoint, pool.places[held, table.checkpoint_place]
        is_worth = _is_worth(pool, request, size, end)
        if not is_worth or pool.cache.blocks[block].entry == NONE or pool.cache.blocks[block].tokens != end:
            forget(pool.cache, pool.counts[0], block)
            if is_worth:
                _insert_state(pool, request, place, block, end)
        return
    if tokens <= 0 or tokens % unit or tokens != _state_end(request.prompt_tokens, unit, told.drops):
        return
    at = _blocks_for(tokens, size) - 1
    if at >= table.count or pool.places[held, at] == NONE:
        return
    _insert_state(pool, request, place, pool.places[held, at], tokens)
    if tokens % size:
        table.partial = table.num_cached = at
        table.source = pool.places[held, at]


@kernel
def _is_worth(pool: GroupPool, request: Any, size: int, end: int) -> bool:
    told, shared = pool.rules[0], pool.rows[request.first_hold].shared_tokens
    if end in (_state_end(request.prompt_tokens, told.alignment, told.drops), shared):
        return True
    if end % size:
        return False
    return bool(told.retain == NO_PLACE or (told.retain > 0 and end % max(told.retain, size) == 0))


@kernel
def _insert_state(pool: GroupPool, request: Any, place: int, block: int, end: int) -> None:
    if block != NONE:
        tag, key = key_at(pool, request, place, end // pool.settings[0].block_size)
        add_partial(pool.cache, pool.counts[0], block, tag, key, end)
        note_state(pool.cache, pool.rules[0].step, tag, key)
