"""A block pool that evicts by a policy of ``sim.vllm.eviction``, block by block.

Each cached key has one block; it knows the block before it in its chain, and how many cached ones follow it. Only idle
blocks that none follows are evicted, so what is cached is always whole chains from their beginning. Belady's policy
alone also evicts a block that others follow, if it is computed again before its next lookup; its row keeps the key. A
request that has computed a block whose key is cached gives its own back and holds the cached one.

The rows of ``Pool.blocks`` begin with the ends of the queues, rings of idle blocks or of forgotten keys. A request's
``last_hold`` is the deepest block that it holds; the others lie before it.
"""

from typing import Any

import numpy as np

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels import layout
from sim.kernels.layout import Pool, Records
from sim.vllm.eviction import (
    ADDED,
    AGES,
    ARC,
    BELADY,
    FIFO,
    REMEMBERING,
    S3_FIFO,
    SIEVE,
    SLRU,
    TTL,
    WORKLOAD,
    age_class,
    level_of,
    return_rate,
)
from tracefile.hashing.splitmix64 import GOLDEN

NONE = 0
KNOWN, PRIVATE, UNHASHED = range(3)
"""Kind of what a key names: ``Pool.keys`` has it; only the request of that serial number has it; it has none."""
NO_SERIAL = -1
"""Of a request that never looks up its private blocks: they need not be found."""
CACHED, FORGOTTEN, RETURNING = range(3)
"""State of a row: a block; the key of an evicted one; such a key, asked for again and not yet computed."""
UNQUEUED = -1
_FIRST, _SECOND, _FIRST_FORGOTTEN, _SECOND_FORGOTTEN, _ASKED_ARC = range(5)
"""Queues of ARC."""
_SMALL, _MAIN, _FORGOTTEN, _ASKED = range(4)
"""Queues of S3-FIFO."""
_GOLDEN = np.uint64(GOLDEN)
_level_of, _age_class, _return_rate = kernel(level_of), kernel(age_class), kernel(return_rate)


def empty_blocks(policy: int, blocks: int, levels: int) -> Records:
    """Return rows of the ends of ``levels`` queues, and of so many blocks."""
    rows = np.zeros(levels + 1 + (3 if policy in REMEMBERING else 1) * blocks, layout.BLOCK)
    rows["before"][:levels] = rows["after"][:levels] = np.arange(levels)
    return rows


@kernel
def private_key(serial: int, depth: int) -> np.uint64:
    return np.uint64(serial << 32 | depth)


@kernel
def first_slot(key: np.uint64, slots: int) -> np.int64:
    """Slot of ``key`` in a hash table of ``slots``, a power of two."""
    mixed = key * _GOLDEN
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(slots - 1))


@kernel
def lookup(pool: Pool, request: Any, most: int) -> tuple[int, int]:
    stay_apart()
    depth, idle, above = 0, 0, NONE
    while depth < most:
        block = _cached_at(pool, request, depth, above)
        if block == NONE:
            break
        idle += pool.blocks[block].references == 0
        depth, above = depth + 1, block
    return depth, idle


@kernel
def hold(pool: Pool, request: Any, most: int) -> int:
    stay_apart()
    depth, request.last_hold = 0, NONE
    while depth < most:
        block = _cached_at(pool, request, depth, request.last_hold)
        if block == NONE:
            break
        _hold_once_more(pool, block)
        depth, request.last_hold = depth + 1, block
    policy = pool.settings[0].evict
    if policy in (ARC, S3_FIFO):
        _recall(pool, request, depth, policy)
    elif policy == WORKLOAD:
        _count_seen(pool, request, depth)
    return depth


@kernel
def take(pool: Pool, count: int) -> None:
    stay_apart()
    counts = pool.counts[0]
    counts.num_free -= count
    unhashed = min(count, counts.num_unhashed)
    counts.num_unhashed -= unhashed
    for _ in range(count - unhashed):
        if len(pool.evicted):
            pool.evicted[counts.evicted_blocks % len(pool.evicted)] = NONE
        _evict(pool, pool.settings[0].evict)
        counts.evicted_blocks += 1


@kernel
def publish(pool: Pool, request: Any, start: int, end: int) -> None:
    stay_apart()
    blocks, counts = pool.blocks, pool.counts[0]
    for depth in range(start, end):
        known = depth < request.known_keys
        kind, key = PRIVATE, private_key(request.serial, depth)
        if known:
            kind, key = KNOWN, pool.keys[request.first_key + depth]
        row = NONE
        if known or request.preemptions > 0:  # else nothing can have its private keys
            row = _row_of(pool, kind, key)
        above = request.last_hold
        if row != NONE and blocks[row].state == CACHED and blocks[row].parent != above:
            counts.not_chained = 1
            return
        request.last_hold = row
        if row != NONE and blocks[row].state == CACHED:
            _hold_once_more(pool, row)
            counts.num_free += 1
            counts.num_unhashed += 1
            continue
        came_back = row != NONE
        if came_back:
            _unlink(blocks, row)
        else:
            row = _new_row(pool)
            request.last_hold = row
            blocks[row].children = 0
            blocks[row].kind, blocks[row].key = kind, np.int64(key)
            if known or request.serial != NO_SERIAL:
                _enter(pool, row)
        block = blocks[row]
        block.state, block.references = CACHED, 1
        block.hits = came_back and pool.settings[0].evict == ARC
        block.level = came_back
        block.depth, block.most_depth = depth, 0
        block.parent = above
        blocks[above].children += 1
        while block.hits and above != NONE and blocks[above].hits == 0:  # or the one before it might go first
            blocks[above].hits = 1
            above = blocks[above].parent


@kernel
def release(pool: Pool, request: Any) -> None:
    stay_apart()
    blocks, counts = pool.blocks, pool.counts[0]
    row, hashed = request.last_hold, 0
    if row != NONE:
        hashed = blocks[row].depth + 1
    while row != NONE:
        blocks[row].references -= 1
        if blocks[row].references == 0:
            counts.num_free += 1
            _queue(pool, request, row)
        else:
            counts.num_repeated -= 1
        row = blocks[row].parent
    request.last_hold = NONE
    counts.num_free += request.num_blocks - hashed
    counts.num_unhashed += request.num_blocks - hashed


@kernel
def _cached_at(pool: Pool, request: Any, depth: int, above: int) -> int:
    """Return the block of the request's chain at ``depth``, behind ``above``; NONE: not cached, or too old."""
    kind, key = PRIVATE, private_key(request.serial, depth)
    if depth < request.known_keys:
        kind, key = KNOWN, pool.keys[request.first_key + depth]
    row = _row_of(pool, kind, key)
    if row == NONE or pool.blocks[row].state != CACHED:
        return NONE
    block, settings = pool.blocks[row], pool.settings[0]
    if block.parent != above:
        pool.counts[0].not_chained = 1
        return NONE
    is_old = block.used_ms + settings.evict_limit < pool.counts[0].now_ms
    return NONE if settings.evict == TTL and block.references == 0 and is_old else int(row)


@kernel
def _hold_once_more(pool: Pool, row: int) -> None:
    block, counts = pool.blocks[row], pool.counts[0]
    block.hits += 1
    if block.references == 0:
        counts.num_free -= 1
        if pool.settings[0].evict < FIFO:
            _unlink(pool.blocks, row)
        if pool.settings[0].evict == WORKLOAD:
            _end_idle(pool, block, 1)
    else:
        counts.num_repeated += 1
    block.references += 1


@kernel
def _queue(pool: Pool, request: Any, row: int) -> None:
    """Queue a block that has become idle, after those that follow it in its chain."""
    blocks, settings, counts = pool.blocks, pool.settings[0], pool.counts[0]
    block, policy = blocks[row], settings.evict
    if policy >= FIFO:
        if block.queue == UNQUEUED:
            whole = policy == S3_FIFO and counts.evicted_blocks == 0
            if whole and blocks[_SMALL].hits >= settings.usable_blocks // 10:
                block.level = _MAIN
            _link(blocks, row, block.level)
        return
    worth = 0
    if policy == BELADY:
        worth = pool.uses[request.first_key + block.depth] if block.depth < request.known_keys else 0
    elif policy == WORKLOAD:
        worth = request.num_blocks - request.earlier_blocks
    block.most_depth = max(block.most_depth, request.num_blocks)
    block.used_ms = counts.now_ms
    beyond = (block.depth - block.most_depth) * settings.block_size + settings.evict_limit
    level = _level_of(policy, block.hits, worth, beyond)
    block.level = level
    _link(blocks, row, level)
    counts.lowest = min(counts.lowest, level)
    if policy == SLRU and blocks[1].hits > settings.usable_blocks * 4 // 5:
        oldest = blocks[1].after
        _unlink(blocks, oldest)
        blocks[oldest].hits = 0
        _link(blocks, oldest, 0)
        counts.lowest = 0


@kernel
def _evict(pool: Pool, policy: int) -> None:
    blocks, counts = pool.blocks, pool.counts[0]
    if policy == WORKLOAD:
        _evict_unlikely(pool)
    elif policy == ARC:
        _evict_arc(pool)
    elif policy == S3_FIFO:
        _evict_s3(pool)
    elif policy == SIEVE:
        row = counts.hand or blocks[0].after
        while _is_bound(blocks[row]) or blocks[row].hits > 0:
            if not _is_bound(blocks[row]):
                blocks[row].hits = 0
            row = blocks[row].after or blocks[0].after
        counts.hand = blocks[row].after
        _drop(pool, row)
    elif policy == FIFO:
        while _is_bound(blocks[blocks[0].after]):
            _move(blocks, blocks[0].after, 0)
        _drop(pool, blocks[0].after)
    else:
        while blocks[counts.lowest].after == counts.lowest:
            counts.lowest += 1
        row = blocks[counts.lowest].after
        if policy == BELADY and blocks[row].children > 0:
            _forget(pool, row, pool.settings[0].evict_limit)
        else:
            _drop(pool, row)


@kernel
def _evict_unlikely(pool: Pool) -> None:
    """Evict the block that is the least likely to return, and keep its key for twice as many evictions as blocks.

    Of each level the least recently used is asked. The oldest of these has none after it.
    """
    blocks, usable = pool.blocks, pool.settings[0].usable_blocks
    found, least = NONE, np.inf
    for level in range(ADDED):
        row = blocks[level].after
        if row == level or blocks[row].children > 0:
            continue
        age, reached, returned, rate = _age_class(pool.counts[0].now_ms - blocks[row].used_ms), 0, 0, 0.0
        for older in range(age, AGES):
            reached += pool.uses[2 * (level * AGES + older)]
        for older in range(age, AGES):  # a return that is due later counts at the time until then
            returned += pool.uses[2 * (level * AGES + older) + 1]
            rate = max(rate, _return_rate(returned, reached, older))
        if rate < least or (rate == least and blocks[row].used_ms < blocks[found].used_ms):
            found, least = row, rate
    if blocks[found].kind != KNOWN:
        _end_idle(pool, blocks[found], 0)
    _forget(pool, found, ADDED)
    if blocks[ADDED].hits > 2 * usable:
        _end_idle(pool, blocks[blocks[ADDED].after], 0)
        _drop(pool, blocks[ADDED].after)


@kernel
def _end_idle(pool: Pool, block: Any, returned: int) -> None:
    """Count a block that was asked for again, or that is forgotten, by its level and the time that it was idle."""
    cell = 2 * (block.level * AGES + _age_class(pool.counts[0].now_ms - block.used_ms))
    pool.uses[cell] += 1
    pool.uses[cell + 1] += returned


@kernel
def _count_seen(pool: Pool, request: Any, depth: int) -> None:
    """Count a request's blocks that were seen before; ``depth`` of them hit, and the evicted ones have returned."""
    request.earlier_blocks = depth
    for place in range(depth, request.known_keys):
        row = _row_of(pool, KNOWN, pool.keys[request.first_key + place])
        request.earlier_blocks += row != NONE
        if row != NONE and pool.blocks[row].state == FORGOTTEN:
            _end_idle(pool, pool.blocks[row], 1)
            _drop(pool, row)


@kernel
def _evict_arc(pool: Pool) -> None:
    """Evict as ARC does (Megiddo and Modha, FAST 2003); ``returning``: blocks of the request that were evicted."""
    blocks, counts, usable = pool.blocks, pool.counts[0], pool.settings[0].usable_blocks
    once, twice = blocks[_FIRST].hits, blocks[_SECOND].hits
    forgotten = blocks[_FIRST_FORGOTTEN].hits
    returning = counts.returning > 0
    if returning:
        counts.returning -= 1
    elif once + forgotten + 1 > usable:
        if once >= usable:
            _drop(pool, blocks[_FIRST].after)
            return
        if forgotten > 0:
            _drop(pool, blocks[_FIRST_FORGOTTEN].after)
    elif blocks[_SECOND_FORGOTTEN].hits >= max(2 * usable - once - twice - forgotten, 1):
        _drop(pool, blocks[_SECOND_FORGOTTEN].after)
    aimed, tie = counts.aimed, returning and counts.of_second
    oldest = blocks[_SECOND].after
    if once > aimed or twice == 0 or (once == aimed and tie and once > 0) or blocks[oldest].children > 0:
        _forget(pool, blocks[_FIRST].after, _FIRST_FORGOTTEN)
    else:
        _forget(pool, oldest, _SECOND_FORGOTTEN)


@kernel
def _evict_s3(pool: Pool) -> None:
    """Evict as S3-FIFO does (Yang et al., SOSP 2023): a tenth of the blocks is the small queue's."""
    blocks, usable = pool.blocks, pool.settings[0].usable_blocks
    if blocks[_MAIN].hits <= usable - usable // 10 and _evict_small(pool):
        return
    while not _evict_main(pool):
        if _evict_small(pool):
            return


@kernel
def _evict_small(pool: Pool) -> bool:
    """Evict from the small queue; False if it ran empty, its used and bound blocks moved to the main one."""
    blocks, usable = pool.blocks, pool.settings[0].usable_blocks
    while blocks[_SMALL].hits > 0:
        row = blocks[_SMALL].after
        if not _is_bound(blocks[row]) and blocks[row].hits < 2:
            if blocks[_FORGOTTEN].hits > 0 and blocks[_FORGOTTEN].hits >= usable * 9 // 10:
                _drop(pool, blocks[_FORGOTTEN].after)
            _forget(pool, row, _FORGOTTEN)
            return True
        blocks[row].hits = 0
        _move(blocks, row, _MAIN)
    return False


@kernel
def _evict_main(pool: Pool) -> bool:
    """Evict from the main queue; False if all of its blocks are bound: the last of their chains are in the other."""
    blocks, bound = pool.blocks, 0
    while bound < blocks[_MAIN].hits:
        row = blocks[_MAIN].after
        bound += 1
        if not _is_bound(blocks[row]):
            if blocks[row].hits == 0:
                _drop(pool, row)
                return True
            blocks[row].hits = min(blocks[row].hits, 3) - 1
            bound = 0
        _move(blocks, row, _MAIN)
    return False


@kernel
def _recall(pool: Pool, request: Any, depth: int, policy: int) -> None:
    """Note which blocks behind a request's hits were evicted a short time ago; ARC learns from it."""
    blocks, counts, usable = pool.blocks, pool.counts[0], pool.settings[0].usable_blocks
    asked = _ASKED_ARC if policy == ARC else _ASKED
    counts.returning = 0
    for place in range(depth, request.known_keys):
        row = _row_of(pool, KNOWN, pool.keys[request.first_key + place])
        if row == NONE or blocks[row].state != FORGOTTEN:
            continue
        if policy == ARC:
            first, second = blocks[_FIRST_FORGOTTEN].hits, blocks[_SECOND_FORGOTTEN].hits
            counts.of_second = blocks[row].queue == _SECOND_FORGOTTEN
            if counts.of_second:
                counts.aimed = max(counts.aimed - max(first / second, 1.0), 0.0)
            else:
                counts.aimed = min(counts.aimed + max(second / first, 1.0), float(usable))
        counts.returning += 1
        blocks[row].state = RETURNING
        _move(blocks, row, asked)
        if blocks[asked].hits > usable:
            _drop(pool, blocks[asked].after)


@kernel
def _is_bound(block: Any) -> bool:
    return bool(block.references > 0 or block.children > 0)


@kernel
def _forget(pool: Pool, row: int, queue: int) -> None:
    """Evict a block and keep its key in ``queue``; a key that no other request has is dropped."""
    block = pool.blocks[row]
    if block.kind != KNOWN:
        _drop(pool, row)
        return
    _leave_chain(pool, block)
    block.state = FORGOTTEN
    _move(pool.blocks, row, queue)


@kernel
def _leave_chain(pool: Pool, block: Any) -> None:
    pool.blocks[block.parent].children -= 1
    if len(pool.evicted) and block.kind == KNOWN:
        pool.evicted[pool.counts[0].evicted_blocks % len(pool.evicted)] = np.uint64(block.key) + np.uint64(1)


@kernel
def _drop(pool: Pool, row: int) -> None:
    """Remove a row, of a block or of the key of one, and the key before it in the chain if kept for this alone."""
    block, above = pool.blocks[row], pool.blocks[row].parent
    if block.state == CACHED:
        _leave_chain(pool, block)
        if pool.blocks[above].state == FORGOTTEN and pool.blocks[above].children == 0:
            _remove(pool, above)
    _remove(pool, row)


@kernel
def _remove(pool: Pool, row: int) -> None:
    blocks, counts = pool.blocks, pool.counts[0]
    block = blocks[row]
    _unlink(blocks, row)
    if block.is_entered:
        _leave(pool, row)
    block.after = counts.free_copy
    counts.free_copy = row


@kernel
def _new_row(pool: Pool) -> int:
    counts, blocks = pool.counts[0], pool.blocks
    row = counts.free_copy
    if row == NONE:
        row = counts.num_copies
        counts.num_copies += 1
    else:
        counts.free_copy = blocks[row].after
    blocks[row].queue = UNQUEUED
    blocks[row].is_entered = 0
    return int(row)


@kernel
def _row_of(pool: Pool, kind: int, key: np.uint64) -> int:
    row = pool.table[first_slot(key, len(pool.table))]
    while row != NONE and (np.uint64(pool.blocks[row].key) != key or pool.blocks[row].kind != kind):
        row = pool.blocks[row].next_in_slot
    return int(row)


@kernel
def _enter(pool: Pool, row: int) -> None:
    block = pool.blocks[row]
    slot = first_slot(np.uint64(block.key), len(pool.table))
    block.is_entered = 1
    block.next_in_slot = pool.table[slot]
    pool.table[slot] = row


@kernel
def _leave(pool: Pool, row: int) -> None:
    blocks, table = pool.blocks, pool.table
    slot = first_slot(np.uint64(blocks[row].key), len(table))
    if table[slot] == row:
        table[slot] = blocks[row].next_in_slot
        return
    before = table[slot]
    while blocks[before].next_in_slot != row:
        before = blocks[before].next_in_slot
    blocks[before].next_in_slot = blocks[row].next_in_slot


@kernel
def _move(blocks: Records, row: int, queue: int) -> None:
    _unlink(blocks, row)
    _link(blocks, row, queue)


@kernel
def _link(blocks: Records, row: int, queue: int) -> None:
    last = blocks[queue].before
    blocks[last].after, blocks[row].before = row, last
    blocks[row].after, blocks[queue].before = queue, row
    blocks[row].queue = queue
    blocks[queue].hits += 1


@kernel
def _unlink(blocks: Records, row: int) -> None:
    before, after = blocks[row].before, blocks[row].after
    blocks[before].after, blocks[after].before = after, before
    blocks[blocks[row].queue].hits -= 1
    blocks[row].queue = UNQUEUED
