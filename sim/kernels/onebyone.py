"""The block pool with one request at a time, and the reasons of what each misses."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import SOURCES, Ints, Places, Pool, Records, record
from sim.kernels.pool import KNOWN, NONE, QUEUE, has_room, hold, index_segments, lookup, publish, release, take

REQUEST = record(
    "first_key known_keys prompt_blocks most_hits full_blocks num_blocks serial preemptions first_hold last_hold tail "
    f"hits cached_blocks seen_blocks {SOURCES}"
)
"""``known_keys`` of its chain are known, ``prompt_blocks`` of these in its prompt; at its end it holds ``num_blocks``,
``full_blocks`` of them full. ``cached_blocks``, ``seen_blocks``: leading blocks of the ``prompt_blocks`` that are
cached at its arrival, and that ever were."""
NEVER = -1


class Evictions(NamedTuple):
    """Evictions by keys, for keys that are numbers from 0 on. No keys: they are not noted."""

    evictor: Ints
    """By key: number of the request that evicted it last; NEVER: it was never evicted."""
    group: Places
    """By request."""
    counts: npt.NDArray[np.int64]
    """By the evictor's group and the group of the request that asks for the block again: blocks."""


@entry
def run_requests(pool: Pool, requests: Records, first: int, evictions: Evictions) -> int:
    """Run the requests from ``first`` on, writing what each finds; return the first that needs longer arrays, or how
    many there are. The table may be another one than in the call before."""
    index_segments(pool)
    for number in range(first, len(requests)):
        request = requests[number]
        if not has_room(pool, request.num_blocks):
            return number
        if len(evictions.evictor):
            _look_back(pool, request, number, evictions)
        request.hits = hold(pool, request, request.most_hits)
        request.tail = NONE  # a new segment behind the hits, where the next requests branch off too
        if len(evictions.evictor):
            _note_evictions(pool, request.num_blocks - request.hits, number, evictions)
        take(pool, request.num_blocks - request.hits)
        publish(pool, request, request.hits, request.full_blocks)
        release(pool, request)
        if pool.counts[0].not_chained:
            break
    return len(requests)


@kernel
def _look_back(pool: Pool, request: Any, number: int, evictions: Evictions) -> None:
    """Count the prompt's blocks that are cached, and behind these the evicted ones by evictor."""
    depth, _ = lookup(pool, request, request.prompt_blocks)
    request.cached_blocks = depth
    while depth < request.prompt_blocks:
        evictor = evictions.evictor[pool.keys[request.first_key + depth]]
        if evictor == NEVER:
            break
        evictions.counts[evictions.group[evictor], evictions.group[number]] += 1
        depth += 1
    request.seen_blocks = depth


@kernel
def _note_evictions(pool: Pool, count: int, number: int, evictions: Evictions) -> None:
    """Note the evictor of the ``count`` blocks at the queue's head, which are taken next."""
    count -= min(count, pool.counts[0].num_unhashed)
    copy = pool.copies[QUEUE].after
    while count > 0:
        segment = pool.segments[pool.copies[copy].segment]
        first = max(segment.start, segment.end - count)
        if segment.kind == KNOWN:
            for depth in range(first, segment.end):
                evictions.evictor[pool.keys[segment.base + depth]] = number
        count -= segment.end - first
        copy = pool.copies[copy].after
