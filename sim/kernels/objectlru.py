"""A plain LRU of single blocks over spans of chains (``sim.kernels.tree``).

A request touches its blocks root first, so of a span the first blocks go first, and what is cached of it is its end.
"""

from typing import NamedTuple

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import SOURCES, Ints, Places, Records, record

RECENCY = record("before after cached length")
"""By a span's number and 1; number 0 is both ends of the order, least recently touched first. ``cached``: of its
``length`` blocks, how many."""
LRU = record(f"capacity cached_blocks evicted_blocks {SOURCES}")


class ObjectLru(NamedTuple):
    """The order of spans, and what is in the cache."""

    recency: Records
    lru: Records
    """One of LRU."""


@entry
def touch_paths(cache: ObjectLru, path_starts: Places, paths: Ints, hits: Places) -> None:
    """Touch every request's spans; ``hits``: how many of its blocks were there."""
    for number in range(len(path_starts) - 1):
        found = 0
        for place in range(path_starts[number], path_starts[number + 1]):
            found += _touch(cache, paths[place] + 1)
        hits[number] = found


@kernel
def _touch(cache: ObjectLru, span: int) -> int:
    """Touch a span's blocks in order. What is missing at its beginning may push out the rest before its turn comes."""
    lru, touched = cache.lru[0], cache.recency[span]
    missing, room = touched.length - touched.cached, lru.capacity - lru.cached_blocks
    while room < missing and lru.cached_blocks > 0:
        room += _evict(cache, missing - room)
        missing = touched.length - touched.cached
    hits = touched.length - missing
    if touched.cached:
        _unlink(cache, span)
    # A span longer than the cache pushes out its own beginning.
    kept = min(touched.length, lru.capacity)
    lru.evicted_blocks += touched.length - kept
    lru.cached_blocks += kept - touched.cached
    touched.cached = kept
    _append(cache, span)
    return int(hits)


@kernel
def _evict(cache: ObjectLru, most: int) -> int:
    lru, span = cache.lru[0], cache.recency[0].after
    oldest = cache.recency[span]
    blocks = min(most, oldest.cached)
    oldest.cached -= blocks
    lru.cached_blocks -= blocks
    lru.evicted_blocks += blocks
    if oldest.cached == 0:
        _unlink(cache, span)
    return int(blocks)


@kernel
def _unlink(cache: ObjectLru, span: int) -> None:
    recency = cache.recency
    before, after = recency[span].before, recency[span].after
    recency[before].after = after
    recency[after].before = before


@kernel
def _append(cache: ObjectLru, span: int) -> None:
    recency = cache.recency
    last = recency[0].before
    recency[last].after = span
    recency[span].before = last
    recency[span].after = 0
    recency[0].before = span
