"""The rules of ``sim.vllm.segments``, whose page explains them, for the compiled step loop."""

from typing import Any

import numpy as np

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels import layout
from sim.kernels.layout import Pool, Records
from tracefile.hashing.splitmix64 import GOLDEN
from tracefile.records.arrays import UInt64Array

QUEUE = 0
"""The copy that is both ends of the free queue."""
_LOOKS = 7
NONE = 0
KNOWN, PRIVATE = range(2)
"""Kind of what a key names: ``Pool.keys`` has it; only the request of that serial number has it."""
_GOLDEN = np.uint64(GOLDEN)


@kernel
def private_key(serial: int, depth: int) -> np.uint64:
    return np.uint64(serial << 32 | depth)


@kernel
def first_slot(key: np.uint64, slots: int) -> np.int64:
    """Slot of ``key`` in a hash table of ``slots``, a power of two."""
    mixed = key * _GOLDEN
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(slots - 1))


def empty_pool(settings: Records, usable: int, keys: UInt64Array, *, records: int, holds: int, slots: int) -> Pool:
    """Return a pool of ``usable`` free blocks with room for so many segments and copies, and for so many holds."""
    counts = np.zeros(1, layout.POOL)
    counts["num_free"] = counts["num_unhashed"] = usable
    return Pool(
        settings,
        counts,
        segments=np.zeros(records + 1, layout.SEGMENT),
        copies=np.zeros(records + 1, layout.COPY),
        holds=np.zeros(holds + 1, layout.HOLD),
        table=np.zeros(slots, np.int32),
        keys=keys,
    )


@kernel
def lookup(pool: Pool, request: Any, most: int) -> tuple[int, int]:
    """Count the leading cached blocks of the request's chain, of ``most``, and those of them without a holder."""
    stay_apart()
    depth, idle = 0, 0
    if not pool.settings[0].enable_prefix_caching:
        return depth, idle
    while depth < most:
        number = _segment_at(pool, request, depth)
        if number == NONE:
            break
        end = _agree_until(pool, request, number, depth, most)
        if pool.copies[pool.segments[number].copy].references == 0:
            idle += end - depth
        depth = end
    return depth, idle


@kernel
def hold(pool: Pool, request: Any, most: int) -> int:
    """Give the request the leading cached blocks of its chain, of ``most``, off the free queue; return their number."""
    stay_apart()
    depth = 0
    while depth < most:
        number = _segment_at(pool, request, depth)
        if number == NONE:
            break
        end = _agree_until(pool, request, number, depth, most)
        if end < pool.segments[number].end:
            _cut(pool, number, end)
        copy = pool.segments[number].copy
        if pool.copies[copy].references == 0:
            unlink(pool.copies, copy)
            pool.counts[0].num_free -= end - depth
        else:
            pool.counts[0].num_repeated += end - depth
        _add_hold(pool, request, copy, end)
        depth = end
    return depth


@kernel
def take(pool: Pool, count: int) -> None:
    """Rule 2: take blocks from the queue's head, evicting what they cached. The caller has checked num_free.

    Hashes that are not chained end the run after this step; until then neither the queue nor the holds are relied on.
    """
    stay_apart()
    if pool.counts[0].not_chained:
        return
    counts, copies = pool.counts[0], pool.copies
    counts.num_free -= count
    unhashed = min(count, counts.num_unhashed)
    counts.num_unhashed -= unhashed
    count -= unhashed
    while count > 0:
        copy = copies[QUEUE].after
        number = copies[copy].segment
        segment = pool.segments[number]
        blocks = segment.end - segment.start
        if blocks > count and copies[copy].next_twin != copy:
            _cut(pool, number, segment.end - count)
            continue
        taken = min(blocks, count)
        counts.evicted_blocks += taken
        if taken < blocks:
            segment.end -= taken
        else:
            _forget(pool, copy)
        count -= taken


@kernel
def publish(pool: Pool, request: Any, start: int, end: int) -> None:
    """Rule 5: make a request's blocks from ``start``, where its last hold ends, to ``end`` findable."""
    stay_apart()
    if not pool.settings[0].enable_prefix_caching or pool.counts[0].not_chained:
        return
    depth = start
    while depth < end:
        known = depth < request.known_keys
        until = min(end, request.known_keys) if known else end
        number = NONE
        if known or request.preemptions > 0:  # else nothing can have its private keys
            number = _segment_at(pool, request, depth)
        if number == NONE:  # then nothing deeper is cached either: a block's parent is always evicted later
            _lengthen(pool, request, depth, until)
            depth = until
            continue
        until = _agree_until(pool, request, number, depth, until)
        if until < pool.segments[number].end:
            _cut(pool, number, until)
        _add_hold(pool, request, _new_copy(pool, number), until)
        depth = until


@kernel
def release(pool: Pool, request: Any) -> None:
    """Rule 3: release a request's blocks, leaf first; blocks without another holder become free."""
    stay_apart()
    counts, copies, holds = pool.counts[0], pool.copies, pool.holds
    hold, last, hashed = request.first_hold, copies[QUEUE].before, 0
    while hold != NONE:
        copy, hashed = holds[hold].copy, holds[hold].end
        while True:
            segment = pool.segments[copies[copy].segment]
            copies[copy].references -= 1
            if copies[copy].references == 0:
                link_after(pool.copies, last, copy)  # before the copies nearer the root
                counts.num_free += segment.end - segment.start
            else:
                counts.num_repeated -= segment.end - segment.start
            if segment.end == hashed:
                break
            copy = copies[copy].deeper
        hold = holds[hold].next
    if request.first_hold != NONE:
        holds[request.last_hold].next = counts.free_hold
        counts.free_hold = request.first_hold
        request.first_hold = request.tail = NONE
    unhashed = request.num_blocks - hashed
    counts.num_free += unhashed
    counts.num_unhashed += unhashed


@kernel
def _segment_at(pool: Pool, request: Any, depth: int) -> int:
    """Return the segment that begins with the request's block ``depth``; NONE: that block is not cached."""
    kind, key = PRIVATE, private_key(request.serial, depth)
    if depth < request.known_keys:
        kind, key = KNOWN, pool.keys[request.first_key + depth]
    number = pool.table[first_slot(key, len(pool.table))]
    while number != NONE:
        segment = pool.segments[number]
        if np.uint64(segment.first_key) == key and segment.kind == kind:
            if segment.start == depth:
                return int(number)
            pool.counts[0].not_chained = 1
            return NONE
        number = segment.next_in_slot
    return NONE


@kernel
def _agree_until(pool: Pool, request: Any, number: int, depth: int, most: int) -> int:
    """Depth up to which a segment that begins at ``depth`` agrees with the request's chain, at most ``most``."""
    segment = pool.segments[number]
    end = min(segment.end, most)
    if segment.kind == KNOWN:
        end = _end_of_match(pool.keys, request.first_key, segment.base, depth, min(end, request.known_keys))
    return int(end)


@kernel
def _lengthen(pool: Pool, request: Any, start: int, end: int) -> None:
    """Cache blocks under new keys: the request's last copy gets longer, or a new segment begins."""
    copies, kind, base = pool.copies, PRIVATE, request.serial
    if start < request.known_keys:
        kind, base = KNOWN, request.first_key
    tail = request.tail
    if tail != NONE:
        while pool.segments[copies[tail].segment].end != start:
            tail = copies[tail].deeper
        request.tail = tail
        segment = pool.segments[copies[tail].segment]
        if segment.kind == kind and copies[tail].references == 1 and copies[tail].next_twin == tail:
            segment.base, segment.end = base, end
            pool.holds[request.last_hold].end = end
            return
    number = _new_segment(pool, kind, base, start, end)
    _enter(pool, number)
    _add_hold(pool, request, _new_copy(pool, number), end)


@kernel
def _add_hold(pool: Pool, request: Any, copy: int, end: int) -> None:
    counts, holds = pool.counts[0], pool.holds
    number = counts.free_hold
    if number == NONE:
        counts.num_holds += 1
        number = counts.num_holds
    else:
        counts.free_hold = holds[number].next
    holds[number].copy, holds[number].end, holds[number].next = copy, end, NONE
    pool.copies[copy].references += 1
    if request.first_hold == NONE:
        request.first_hold = number
    else:
        holds[request.last_hold].next = number
    request.last_hold, request.tail = number, copy


@kernel
def _cut(pool: Pool, number: int, depth: int) -> None:
    """Make two segments of one; the deeper part of each copy that is free stands just before the other."""
    stay_apart()
    copies, segment = pool.copies, pool.segments[number]
    deeper = _new_segment(pool, segment.kind, segment.base, depth, segment.end)
    segment.end = depth
    _enter(pool, deeper)
    copy = segment.copy
    while True:
        part = _new_copy(pool, deeper)
        copies[part].references, copies[part].deeper = copies[copy].references, copies[copy].deeper
        copies[copy].deeper = part
        if copies[copy].references == 0:
            link_after(pool.copies, copies[copy].before, part)
        copy = copies[copy].next_twin
        if copy == segment.copy:
            break


@kernel
def _new_segment(pool: Pool, kind: int, base: int, start: int, end: int) -> int:
    counts = pool.counts[0]
    number = counts.free_segment
    if number == NONE:
        counts.num_segments += 1
        number = counts.num_segments
    else:
        counts.free_segment = pool.segments[number].copy
    segment = pool.segments[number]
    segment.kind, segment.base, segment.start, segment.end, segment.copy = kind, base, start, end, NONE
    return int(number)


@kernel
def _new_copy(pool: Pool, number: int) -> int:
    """Add a copy of a segment, the last in line, in no queue and with no holder."""
    counts, copies, segment = pool.counts[0], pool.copies, pool.segments[number]
    copy = counts.free_copy
    if copy == NONE:
        counts.num_copies += 1
        copy = counts.num_copies
    else:
        counts.free_copy = copies[copy].after
    copies[copy].segment, copies[copy].references = number, 0
    if segment.copy == NONE:
        segment.copy = copy
        copies[copy].previous_twin = copy
    first = segment.copy
    last = copies[first].previous_twin
    copies[last].next_twin = copy
    copies[copy].previous_twin = last
    copies[copy].next_twin = first
    copies[first].previous_twin = copy
    return int(copy)


@kernel
def _forget(pool: Pool, copy: int) -> None:
    """Remove a free copy; with its last copy, the segment."""
    counts, copies = pool.counts[0], pool.copies
    number, following, previous = copies[copy].segment, copies[copy].next_twin, copies[copy].previous_twin
    segment = pool.segments[number]
    unlink(pool.copies, copy)
    copies[copy].after = counts.free_copy
    counts.free_copy = copy
    if following != copy:
        copies[previous].next_twin = following
        copies[following].previous_twin = previous
        if segment.copy == copy:
            segment.copy = following
        return
    _leave(pool, number)
    segment.copy = counts.free_segment
    counts.free_segment = number


@kernel
def _enter(pool: Pool, number: int) -> None:
    segment = pool.segments[number]
    key = private_key(segment.base, segment.start)
    if segment.kind == KNOWN:
        key = pool.keys[segment.base + segment.start]
    slot = first_slot(key, len(pool.table))
    segment.first_key = np.int64(key)
    segment.next_in_slot = pool.table[slot]
    pool.table[slot] = number


@kernel
def _leave(pool: Pool, number: int) -> None:
    segments, table = pool.segments, pool.table
    slot = first_slot(np.uint64(segments[number].first_key), len(table))
    if table[slot] == number:
        table[slot] = segments[number].next_in_slot
        return
    before = table[slot]
    while segments[before].next_in_slot != number:
        before = segments[before].next_in_slot
    segments[before].next_in_slot = segments[number].next_in_slot


@kernel
def _end_of_match(keys: UInt64Array, one: int, other: int, start: int, end: int) -> int:
    """Depth up to which two chains agree that agree at ``start``, at most ``end``: equal keys have equal ones before
    them. Key number d of the chains is ``keys[one + d]`` and ``keys[other + d]``."""
    if keys[one + end - 1] == keys[other + end - 1]:
        return end
    # Several looks at once: each is far away in memory, and they do not depend on each other.
    same, differs = start, end - 1
    while differs - same > 1:
        step = (differs - same + _LOOKS) // (_LOOKS + 1)
        agree = 0
        for look in range(1, _LOOKS + 1):
            place = min(same + look * step, differs)
            agree += keys[one + place] == keys[other + place]
        differs = min(same + (agree + 1) * step, differs)
        same = min(same + agree * step, differs - 1)  # more, where hashes are not chained
    return same + 1


@kernel
def link_after(copies: Records, before: int, copy: int) -> None:
    after = copies[before].after
    copies[before].after = copy
    copies[copy].before = before
    copies[copy].after = after
    copies[after].before = copy


@kernel
def unlink(copies: Records, copy: int) -> None:
    before, after = copies[copy].before, copies[copy].after
    copies[before].after = after
    copies[after].before = before
