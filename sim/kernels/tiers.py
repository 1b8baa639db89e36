"""Host memory and disk behind the pool, as vLLM's offloading connector has them.

A tier keeps blocks by key, the least recently used first out. Blocks of computed prompts are stored after each step,
all of a step's or none. A request that is admitted and finds further blocks of its chain there holds room for them and
waits beside the others for their transfer. Its blocks count as used when it ends, the leaf before the root. Transfers
of one direction follow each other: one that is asked for waits for those before it, and for its blocks to be there.
"""

from typing import Any

import numpy as np

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels.layout import DISK, HOST, NONE, Pool, Records, Scheduler, Tier
from sim.kernels.pool import KNOWN, PRIVATE, first_slot, private_key
from sim.vllm import rules

NO_BLOCK = 0
"""Of a hash chain's end; the first numbers are the two lists' ends."""
LISTS = 2
WAIT = -2
_blocks_for = kernel(rules.blocks_for)


@kernel
def seek(scheduler: Scheduler, place: int, hits: int) -> int:
    """Return the depth up to which the tiers have a request's blocks, from ``hits`` on; WAIT: another request is just
    loading some of them."""
    stay_apart()
    tier, pool, request, requests = scheduler.tier, scheduler.pool, scheduler.requests[place], scheduler.requests
    state = tier.state[0]
    if request.prompt_logprobs:
        return hits
    end = _kept_until(pool, tier, request, hits, request.num_tokens // state.block_size)
    other = state.first_loading
    while other != NONE and end > hits:
        depth = max(hits, requests[other].num_hashed)
        both = depth < min(end, requests[other].num_blocks)
        if both and _key_at(pool, request, depth) == _key_at(pool, requests[other], depth):
            return WAIT
        other = tier.requests[other].next
    return end


@kernel
def reserved_blocks(scheduler: Scheduler) -> int:
    """Count the blocks that requests will still take that are being loaded, or prefilled."""
    requests, found, block_size = scheduler.requests, 0, scheduler.settings[0].block_size
    for position in range(scheduler.state[0].num_running):
        request = requests[scheduler.running[position]]
        found += max(_blocks_for(request.num_tokens, block_size) - request.num_blocks, 0)
    place = scheduler.tier.state[0].first_loading
    while place != NONE:
        found += max(_blocks_for(requests[place].num_tokens, block_size) - requests[place].num_blocks, 0)
        place = scheduler.tier.requests[place].next
    return found


@kernel
def load(scheduler: Scheduler, place: int, first: int, end: int) -> float:
    """Transfer a request's blocks from ``first`` to ``end`` into the pool; return the time at which they are there."""
    stay_apart()
    pool, tier, request = scheduler.pool, scheduler.tier, scheduler.requests[place]
    state, own = tier.state[0], tier.requests[place]
    begin_ms = max(state.now_ms, state.read_free_ms, _promote(pool, tier, request, first, end))
    own.first, own.stored, tokens = min(own.first, first), end, (end - first) * state.block_size
    done_ms = begin_ms + state.latency_ms + tokens * state.token_ms
    for depth in range(first, end):
        number = _find(tier, HOST, *_key_at(pool, request, depth))
        tier.blocks[number].busy_ms = max(tier.blocks[number].busy_ms, done_ms)
    state.read_free_ms = done_ms
    state.loads += 1
    state.loaded_tokens += tokens
    return float(done_ms)


@kernel
def end_loading(tier: Tier, place: int) -> None:
    """Take a request out of the list of those that are being loaded."""
    stay_apart()
    state, before = tier.state[0], NONE
    other = state.first_loading
    while other != place:
        before, other = other, tier.requests[other].next
    if before == NONE:
        state.first_loading = tier.requests[place].next
    else:
        tier.requests[before].next = tier.requests[place].next


@kernel
def note_ended(tier: Tier, place: int) -> None:
    """Note that a request has ended: its blocks count as used after the next step's are stored, of an idle engine
    at once."""
    state = tier.state[0]
    tier.requests[place].next = NONE
    if state.last_ended == NONE:
        state.first_ended = place
    else:
        tier.requests[state.last_ended].next = place
    state.last_ended = place


@kernel
def store_step(scheduler: Scheduler, slot: int) -> None:
    """Store the blocks of prompts that a step computes."""
    stay_apart()
    tier, pool, requests, shares = scheduler.tier, scheduler.pool, scheduler.requests, scheduler.shares[slot]
    state = tier.state[0]
    for number in range(scheduler.steps[slot].count):
        request, own = requests[shares[number].place], tier.requests[shares[number].place]
        full = min(request.num_computed, request.prompt_tokens) // state.block_size
        if full <= own.stored:
            continue
        if _store(pool, tier, request, own.stored, full):
            own.first, own.stored = min(own.first, own.stored), full
        else:
            scheduler.state[0].is_quiet = 0  # the next step tries again


@kernel
def use_ended(scheduler: Scheduler) -> None:
    """Count the blocks of ended requests as used."""
    stay_apart()
    tier, pool, requests = scheduler.tier, scheduler.pool, scheduler.requests
    state, place = tier.state[0], tier.state[0].first_ended
    while place != NONE:
        own = tier.requests[place]
        for depth in range(own.stored - 1, own.first - 1, -1):
            key, kind = _key_at(pool, requests[place], depth)
            for level in (HOST, DISK):
                number = _find(tier, level, key, kind)
                if number != NO_BLOCK:
                    _renew(tier.blocks, level, number)
        place = own.next
    state.first_ended = state.last_ended = NONE


@kernel
def _kept_until(pool: Pool, tier: Tier, request: Any, first: int, most: int) -> int:
    """Return the depth up to which a tier has all blocks of a request, from ``first`` on."""
    stay_apart()
    depth = first
    while depth < most:
        key, kind = _key_at(pool, request, depth)
        if _find(tier, HOST, key, kind) == NO_BLOCK and _find(tier, DISK, key, kind) == NO_BLOCK:
            break
        depth += 1
    return depth


@kernel
def _lacking(pool: Pool, tier: Tier, request: Any, first: int, end: int) -> tuple[int, float]:
    """Count blocks that the host lacks, and mark the others of this round; return the time at which these are there."""
    stay_apart()
    missing, ready_ms = 0, tier.state[0].now_ms
    tier.counts[0].round += 1
    for depth in range(first, end):
        number = _find(tier, HOST, *_key_at(pool, request, depth))
        if number == NO_BLOCK:
            missing += 1
        else:
            tier.blocks[number].round = tier.counts[0].round
            ready_ms = max(ready_ms, tier.blocks[number].ready_ms)
    return missing, ready_ms


@kernel
def _promote(pool: Pool, tier: Tier, request: Any, first: int, end: int) -> float:
    """Read blocks that only the disk has into the host's memory; return the time at which all are there."""
    stay_apart()
    state = tier.state[0]
    missing, ready_ms = _lacking(pool, tier, request, first, end)
    if missing == 0:
        return float(ready_ms)
    begin_ms = max(state.now_ms, state.disk_read_free_ms)
    for depth in range(first, end):
        key, kind = _key_at(pool, request, depth)
        if _find(tier, HOST, key, kind) == NO_BLOCK:
            begin_ms = max(begin_ms, tier.blocks[_find(tier, DISK, key, kind)].ready_ms)
    read_ms = begin_ms + state.disk_latency_ms + missing * state.block_size * state.disk_token_ms
    state.disk_read_free_ms = read_ms
    state.disk_read_blocks += missing
    for depth in range(first, end):
        key, kind = _key_at(pool, request, depth)
        if _find(tier, HOST, key, kind) == NO_BLOCK and _has_room(tier, HOST, 1):
            _insert(tier, HOST, key, kind, read_ms)
    return float(max(ready_ms, read_ms))


@kernel
def _store(pool: Pool, tier: Tier, request: Any, first: int, end: int) -> bool:
    """Store blocks that a tier lacks; False: the host has no room for them now."""
    stay_apart()
    missing, _ = _lacking(pool, tier, request, first, end)
    if missing == 0:
        return True
    if not _has_room(tier, HOST, missing):
        return False
    ready_ms = _written_ms(tier, HOST, missing)
    tier.state[0].stored_blocks += missing
    for depth in range(first, end):
        key, kind = _key_at(pool, request, depth)
        if _find(tier, HOST, key, kind) == NO_BLOCK:
            _insert(tier, HOST, key, kind, ready_ms)
            _keep_on_disk(tier, key, kind)
    return True


@kernel
def _keep_on_disk(tier: Tier, key: np.uint64, kind: int) -> None:
    stay_apart()
    if tier.state[0].disk_blocks == 0 or _find(tier, DISK, key, kind) != NO_BLOCK or not _has_room(tier, DISK, 1):
        return
    tier.state[0].disk_stored_blocks += 1
    _insert(tier, DISK, key, kind, _written_ms(tier, DISK, 1))


@kernel
def _written_ms(tier: Tier, level: int, blocks: int) -> float:
    """Write so many blocks at once; return the time at which they can be read."""
    state, tokens = tier.state[0], blocks * tier.state[0].block_size
    if level == HOST:
        state.write_free_ms = max(state.now_ms, state.write_free_ms) + state.latency_ms + tokens * state.token_ms
        return float(state.write_free_ms)
    begin_ms = max(state.now_ms, state.disk_write_free_ms)
    state.disk_write_free_ms = begin_ms + state.disk_latency_ms + tokens * state.disk_token_ms
    return float(state.disk_write_free_ms)


@kernel
def _key_at(pool: Pool, request: Any, depth: int) -> tuple[np.uint64, int]:
    if depth < request.known_keys:
        return pool.keys[request.first_key + depth], KNOWN
    return private_key(request.serial, depth), PRIVATE


@kernel
def _has_room(tier: Tier, level: int, blocks: int) -> bool:
    """Return whether a tier has so many free places, or blocks that may go: not in transit, nor of this round."""
    stay_apart()
    capacity, used, number = tier.state[0].host_blocks, tier.counts[0].host_used, tier.blocks[HOST].newer
    if level == DISK:
        capacity, used, number = tier.state[0].disk_blocks, tier.counts[0].disk_used, tier.blocks[DISK].newer
    lacking = blocks - (capacity - used)
    while lacking > 0 and number != level:
        lacking -= _may_go(tier, number)
        number = tier.blocks[number].newer
    return bool(lacking <= 0)


@kernel
def _may_go(tier: Tier, number: int) -> bool:
    block = tier.blocks[number]
    return bool(max(block.ready_ms, block.busy_ms) <= tier.state[0].now_ms and block.round != tier.counts[0].round)


@kernel
def _insert(tier: Tier, level: int, key: np.uint64, kind: int, ready_ms: float) -> None:
    """Keep a block, in the place of the least recently used that may go if there is no free one."""
    stay_apart()
    counts, state, blocks, table = tier.counts[0], tier.state[0], tier.blocks, tier.table
    if level == HOST and counts.host_used < state.host_blocks:
        number = LISTS + counts.host_used
        counts.host_used += 1
        blocks[number].older = blocks[number].newer = number
    elif level == DISK and counts.disk_used < state.disk_blocks:
        number = LISTS + state.host_blocks + counts.disk_used
        counts.disk_used += 1
        blocks[number].older = blocks[number].newer = number
    else:
        number = blocks[level].newer
        while not _may_go(tier, number):
            number = blocks[number].newer
        slot = first_slot(np.uint64(blocks[number].key), len(table))
        if table[slot] == number:
            table[slot] = blocks[number].next_in_slot
        else:
            before = table[slot]
            while blocks[before].next_in_slot != number:
                before = blocks[before].next_in_slot
            blocks[before].next_in_slot = blocks[number].next_in_slot
        counts.disk_evicted += level == DISK
        counts.host_evicted += level == HOST
    block = blocks[number]
    block.key, block.kind, block.round = np.int64(key), kind, counts.round
    block.ready_ms = block.busy_ms = ready_ms
    slot = first_slot(key, len(table))
    block.next_in_slot = table[slot]
    table[slot] = number
    _renew(blocks, level, number)


@kernel
def _find(tier: Tier, level: int, key: np.uint64, kind: int) -> int:
    stay_apart()
    number = tier.table[first_slot(key, len(tier.table))]
    first_of_disk = LISTS + tier.state[0].host_blocks
    while number != NO_BLOCK:
        block = tier.blocks[number]
        if np.uint64(block.key) == key and block.kind == kind and (number >= first_of_disk) == (level == DISK):
            return int(number)
        number = block.next_in_slot
    return NO_BLOCK


@kernel
def _renew(blocks: Records, level: int, number: int) -> None:
    """Make a block the one of its tier that was used last."""
    blocks[blocks[number].older].newer = blocks[number].newer
    blocks[blocks[number].newer].older = blocks[number].older
    last = blocks[level].older
    blocks[last].newer = number
    blocks[number].older = last
    blocks[number].newer = level
    blocks[level].older = number
