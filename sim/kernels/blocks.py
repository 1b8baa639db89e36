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
from sim.vllm.eviction import BELADY, SLRU, TTL, level_of
from tracefile.hashing.splitmix64 import GOLDEN

NONE = 0
KNOWN, PRIVATE = range(2)
"""Kind of what a key names: ``Pool.keys`` has it; only the request of that serial number has it."""
NO_SERIAL = -1
"""Of a request that never looks up its private blocks: they need not be found."""
CACHED, FORGOTTEN = range(2)
"""State of a row: a block; the key of an evicted one."""
_GOLDEN = np.uint64(GOLDEN)
_level_of = kernel(level_of)


def empty_blocks(blocks: int, levels: int) -> Records:
    """Return rows of the ends of ``levels`` queues, and of so many blocks."""
    rows = np.zeros(levels + 1 + blocks, layout.BLOCK)
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
        _evict(pool)
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
        if row != NONE:
            _unlink(blocks, row)
        else:
            row = _new_row(pool)
            request.last_hold = row
            blocks[row].children = 0
            blocks[row].kind, blocks[row].key = kind, np.int64(key)
            if known or request.serial != NO_SERIAL:
                _enter(pool, row)
        block = blocks[row]
        block.state, block.references, block.hits = CACHED, 1, 0
        block.depth, block.parent = depth, above
        blocks[above].children += 1


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
        _unlink(pool.blocks, row)
    else:
        counts.num_repeated += 1
    block.references += 1


@kernel
def _queue(pool: Pool, request: Any, row: int) -> None:
    """Queue a block that has become idle, after those that follow it in its chain."""
    blocks, settings, counts = pool.blocks, pool.settings[0], pool.counts[0]
    block, policy, worth = blocks[row], settings.evict, 0
    if policy == BELADY:
        worth = pool.uses[request.first_key + block.depth] if block.depth < request.known_keys else 0
    block.used_ms = counts.now_ms
    level = _level_of(policy, block.hits, worth)
    _link(blocks, row, level)
    counts.lowest = min(counts.lowest, level)
    if policy == SLRU and blocks[1].hits > settings.usable_blocks * 4 // 5:
        oldest = blocks[1].after
        _unlink(blocks, oldest)
        blocks[oldest].hits = 0
        _link(blocks, oldest, 0)
        counts.lowest = 0


@kernel
def _evict(pool: Pool) -> None:
    blocks, counts = pool.blocks, pool.counts[0]
    while blocks[counts.lowest].after == counts.lowest:
        counts.lowest += 1
    row = blocks[counts.lowest].after
    if pool.settings[0].evict == BELADY and blocks[row].children > 0:
        _forget(pool, row, pool.settings[0].evict_limit)
    else:
        _drop(pool, row)


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
