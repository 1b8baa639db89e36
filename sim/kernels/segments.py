"""vLLM's block pool with one request at a time, by segments: what it costs follows branches, not blocks.

Chained keys form a tree, and one request after another leaves its blocks in the free queue leaf first. So blocks that
lie together in a chain, came together and were touched together stay together: a segment. A hit takes its leading
blocks, an eviction its last ones; either cuts it in two where it ends within it, and nothing is ever joined. A block's
parent is always reused after it, so what is cached of a chain is its beginning.

A key already cached may be computed again (a prompt of full blocks only may not hit its last, rule 6). Its second block
is a second copy of the segment: copies stand in line in the order in which they were cached, each with a place of its
own in the queue.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import SOURCES, Ints, Records, record
from sim.kernels.ring import link_after, unlink
from sim.kernels.slots import end_of_match, first_slot

SEGMENT = record("kind first_key base start end copy num_copies")
"""Blocks ``start`` to ``end`` of a chain whose key number d is ``keys[base + d]``. ``first_key``: the one at ``start``,
here to save a look far away; ``copy``: the first in line."""
KNOWN, PRIVATE, UNHASHED = range(3)
"""A segment's kind: lookups find it; it is cached under keys that nothing else has; it is not cached at all."""
COPY = record("segment before after previous_twin next_twin")
"""A place in the free queue; ``next_twin``: the copy of the same segment that was cached next, round to the first."""
QUEUE, HELD, FIRST_COPY = 0, 1, 2
"""The copies that are ends of lists: of the free queue, of what the request in hand has hit."""
CACHE = record(
    "usable num_unhashed append_all num_segments free_segment num_copies free_copy most_copies evicted_blocks "
    f"{SOURCES}"
)
"""``num_unhashed``: blocks at the queue's head that hold nothing known; ``most_copies``: of any segment so far."""
REQUEST = record("first_key known full held most_hits hits")
"""``known``: keys; ``full`` − ``known`` more blocks get full with what nothing else has; ``held``: blocks at its
end."""
NOT_CHAINED = -1

Keys = npt.NDArray[np.uint64]


class SegmentCache(NamedTuple):
    """The cache between two requests: everything is free."""

    cache: Records
    """One of CACHE."""
    segments: Records
    copies: Records
    table: Ints
    """Slots by a segment's first key: its number and 1; 2**n of them, more than twice as many as segments."""


@entry
def run_requests(pool: SegmentCache, keys: Keys, requests: Records, first: int) -> int:
    """Run requests from ``first`` on, writing their hits; returns how many have run: where it is not all of them, the
    next may need longer arrays. NOT_CHAINED: a key occurs at two depths."""
    cache = pool.cache[0]
    for number in range(first, len(requests)):
        request = requests[number]
        # A cut doubles a segment's copies. There are three cuts at most: where hits, evictions and second copies end.
        second = min(request.held, cache.num_segments + 3)
        most = cache.num_copies + 3 * (cache.most_copies + 1) + second + 3
        if len(pool.copies) < min(most, cache.usable + FIRST_COPY):
            return number
        request.hits = _hold_hits(pool, keys, request.first_key, request.most_hits)
        if request.hits < 0:
            return NOT_CHAINED
        _take(pool, keys, request.held - request.hits)
        if not _insert(pool, keys, request.first_key, request.hits, request.known):
            return NOT_CHAINED
        if request.full > request.known:
            _new_copy(pool, _new_segment(pool, PRIVATE, 0, 0, request.full - request.known))
        if request.held > request.full:
            if cache.append_all:
                _new_copy(pool, _new_segment(pool, UNHASHED, 0, 0, request.held - request.full))
            else:
                cache.num_unhashed += request.held - request.full
        _release(pool)
    return len(requests)


@entry
def enter_all(pool: SegmentCache) -> None:
    """Fill an empty table with every segment that can be found."""
    copy = pool.copies[QUEUE].after
    while copy != QUEUE:
        number = pool.copies[copy].segment
        if pool.segments[number].kind == KNOWN and pool.segments[number].copy == copy:
            _put(pool, number)
        copy = pool.copies[copy].after


@entry
def move_keys(pool: SegmentCache, keys: Keys, into: Keys) -> int:
    """Copy the keys of what is cached to ``into`` and look for them there from now on; how many."""
    end, copy = 0, pool.copies[QUEUE].after
    while copy != QUEUE:
        segment = pool.segments[pool.copies[copy].segment]
        if segment.kind == KNOWN and segment.copy == copy:
            for depth in range(segment.start, segment.end):
                into[end + depth - segment.start] = keys[segment.base + depth]
            segment.base = end - segment.start
            end += segment.end - segment.start
        copy = pool.copies[copy].after
    return end


@kernel
def _hold_hits(pool: SegmentCache, keys: Keys, first: int, most: int) -> int:
    """Take the leading segments that are cached out of the queue, cut where the request leaves them; how many blocks
    that is."""
    depth = 0
    while depth < most:
        number = _find(pool, keys[first + depth])
        if number < 0:
            break
        segment = pool.segments[number]
        if segment.start != depth:
            return NOT_CHAINED
        end = end_of_match(keys, first, segment.base, depth, min(segment.end, most))
        if end < segment.end:
            _cut(pool, keys, number, end)
        unlink(pool.copies, segment.copy)
        link_after(pool.copies, HELD, segment.copy)
        depth = end
    return depth


@kernel
def _take(pool: SegmentCache, keys: Keys, need: int) -> None:
    """Rule 2: reuse blocks from the queue's head, those first that hold nothing known."""
    cache, copies = pool.cache[0], pool.copies
    unhashed = min(need, cache.num_unhashed)
    cache.num_unhashed -= unhashed
    need -= unhashed
    while need > 0:
        copy = copies[QUEUE].after
        number = copies[copy].segment
        segment = pool.segments[number]
        blocks = segment.end - segment.start
        if blocks > need:
            if copies[copy].next_twin == copy:
                segment.end -= need
                cache.evicted_blocks += need
                break
            _cut(pool, keys, number, segment.end - need)
            continue
        if segment.kind != UNHASHED:
            cache.evicted_blocks += blocks
        need -= blocks
        _forget(pool, copy)


@kernel
def _insert(pool: SegmentCache, keys: Keys, first: int, depth: int, known: int) -> bool:
    """Rule 5 for the blocks from ``depth`` on: a new segment, after new copies of what is cached already (rule 7)."""
    while depth < known:
        number = _find(pool, keys[first + depth])
        if number < 0:
            number = _new_segment(pool, KNOWN, first, depth, known)
            _enter(pool, keys, number)
            _new_copy(pool, number)
            break
        segment = pool.segments[number]
        if segment.start != depth:
            return False
        end = end_of_match(keys, first, segment.base, depth, min(segment.end, known))
        if end < segment.end:
            _cut(pool, keys, number, end)
        _new_copy(pool, number)
        depth = end
    return True


@kernel
def _release(pool: SegmentCache) -> None:
    """Rule 3: what the request held joins the queue's tail, leaf first."""
    copies = pool.copies
    leaf, root, last = copies[HELD].after, copies[HELD].before, copies[QUEUE].before
    if leaf == HELD:
        return
    copies[last].after = leaf
    copies[leaf].before = last
    copies[root].after = QUEUE
    copies[QUEUE].before = root
    copies[HELD].after = HELD
    copies[HELD].before = HELD


@kernel
def _cut(pool: SegmentCache, keys: Keys, number: int, depth: int) -> None:
    """Make two segments of one; of each copy the deeper part stands just before the other, in whichever list."""
    copies, segment = pool.copies, pool.segments[number]
    deeper = _new_segment(pool, segment.kind, segment.base, depth, segment.end)
    segment.end = depth
    if segment.kind == KNOWN:
        _enter(pool, keys, deeper)
    copy = segment.copy
    while True:
        before = copies[copy].before
        _new_copy(pool, deeper)
        newest = copies[pool.segments[deeper].copy].previous_twin
        unlink(pool.copies, newest)
        link_after(pool.copies, before, newest)
        copy = copies[copy].next_twin
        if copy == segment.copy:
            break


@kernel
def _new_segment(pool: SegmentCache, kind: int, base: int, start: int, end: int) -> int:
    cache = pool.cache[0]
    number = cache.free_segment
    if number < 0:
        number = cache.num_segments
        cache.num_segments += 1
    else:
        cache.free_segment = pool.segments[number].copy
    segment = pool.segments[number]
    segment.kind, segment.base, segment.start, segment.end = kind, base, start, end
    segment.copy, segment.num_copies = -1, 0
    return int(number)


@kernel
def _new_copy(pool: SegmentCache, number: int) -> None:
    """One more copy of a segment, the last in line, held by the request in hand as its deepest."""
    cache, copies, segment = pool.cache[0], pool.copies, pool.segments[number]
    copy = cache.free_copy
    if copy < 0:
        copy = cache.num_copies
        cache.num_copies += 1
    else:
        cache.free_copy = copies[copy].after
    copies[copy].segment = number
    first = segment.copy
    if first < 0:
        segment.copy = first = copy
        copies[first].previous_twin = copy
    last = copies[first].previous_twin
    copies[last].next_twin = copy
    copies[copy].previous_twin = last
    copies[copy].next_twin = first
    copies[first].previous_twin = copy
    segment.num_copies += 1
    cache.most_copies = max(cache.most_copies, segment.num_copies)
    link_after(pool.copies, HELD, copy)


@kernel
def _forget(pool: SegmentCache, copy: int) -> None:
    """A copy is gone from the cache; with the last one, the segment."""
    cache, copies = pool.cache[0], pool.copies
    number, following, previous = copies[copy].segment, copies[copy].next_twin, copies[copy].previous_twin
    segment = pool.segments[number]
    unlink(pool.copies, copy)
    copies[copy].after = cache.free_copy
    cache.free_copy = copy
    segment.num_copies -= 1
    if following != copy:
        copies[previous].next_twin = following
        copies[following].previous_twin = previous
        if segment.copy == copy:
            segment.copy = following
        return
    if segment.kind == KNOWN:
        _leave(pool, number)
    segment.copy = cache.free_segment
    cache.free_segment = number


@kernel
def _find(pool: SegmentCache, key: np.uint64) -> int:
    """The segment that begins with ``key``; −1: none is cached."""
    table = pool.table
    mask, slot = len(table) - 1, first_slot(key, len(table))
    while table[slot] != 0:
        number = table[slot] - 1
        if np.uint64(pool.segments[number].first_key) == key:
            return int(number)
        slot = (slot + 1) & mask
    return -1


@kernel
def _enter(pool: SegmentCache, keys: Keys, number: int) -> None:
    """Let a segment be found by its first key."""
    segment = pool.segments[number]
    segment.first_key = np.int64(keys[segment.base + segment.start])
    _put(pool, number)


@kernel
def _put(pool: SegmentCache, number: int) -> None:
    table = pool.table
    slot = first_slot(np.uint64(pool.segments[number].first_key), len(table))
    while table[slot] != 0:
        slot = (slot + 1) & (len(table) - 1)
    table[slot] = number + 1


@kernel
def _leave(pool: SegmentCache, number: int) -> None:
    """Take a segment out of the table, and close the gap that lookups would stop at."""
    table = pool.table
    mask, gap = len(table) - 1, first_slot(np.uint64(pool.segments[number].first_key), len(table))
    while table[gap] != number + 1:
        gap = (gap + 1) & mask
    slot = (gap + 1) & mask
    while table[slot] != 0:
        home = first_slot(np.uint64(pool.segments[table[slot] - 1].first_key), len(table))
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            table[gap] = table[slot]
            gap = slot
        slot = (slot + 1) & mask
    table[gap] = 0
