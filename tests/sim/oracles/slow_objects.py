"""Hits of single objects in a cache, each policy as its paper or its definition says it, without chains or blocks."""

from collections.abc import Sequence


def slru(keys: Sequence[int], size: int) -> int:
    """Segmented LRU (Karedla, Love and Wherry, 1994), four fifths protected.

    A miss enters the probationary segment as its most recent; a hit moves to the protected one as its most recent. The
    least recent that no longer fits there goes back as the most recent of the probationary segment, which loses its
    least recent to each miss.
    """
    probationary, protected, hits = list[int](), list[int](), 0
    for key in keys:
        if key in protected or key in probationary:
            hits += 1
            (protected if key in protected else probationary).remove(key)
            protected.append(key)
            if len(protected) > size * 4 // 5:
                probationary.append(protected.pop(0))
        else:
            if len(probationary) + len(protected) == size:
                (probationary or protected).pop(0)
            probationary.append(key)
    return hits


def lfu(keys: Sequence[int], size: int) -> int:
    """Evict the least often used since it was cached, of equals the least recently used."""
    used, last, hits = dict[int, int](), dict[int, int](), 0
    for now, key in enumerate(keys):
        hits += key in used
        if key not in used and len(used) == size:
            del used[min(used, key=lambda one: (used[one], last[one]))]
        used[key] = used.get(key, -1) + 1
        last[key] = now
    return hits


def ttl(keys: Sequence[int], size: int, after_ms: float, every_ms: float) -> int:
    """LRU whose objects are gone when they were unused for longer than ``after_ms``; a key comes each ``every_ms``."""
    last, hits = dict[int, float](), 0
    for number, key in enumerate(keys):
        now_ms = number * every_ms
        hits += key in last and now_ms - last[key] <= after_ms
        if key not in last and len(last) == size:
            del last[min(last, key=lambda one: last[one])]
        last[key] = now_ms
    return hits
