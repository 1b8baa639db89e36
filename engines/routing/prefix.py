"""Prefix index of a router, and the policy of the longest cached prefix. mypyc compiles this module."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from typing import Final

from engines.routing.load import least_loaded
from engines.routing.records import RoutedEngine, RoutedRequest

IMBALANCE_REQUESTS: Final = 8
"""Largest difference in requests between two engines …"""
IMBALANCE_RATIO: Final = 1.5
"""… and largest ratio; beyond both, load decides instead of the prefix. SGLang's router: 64 and 1.5."""
LEAST_MATCH: Final = 0.3
"""Least share of a prompt's full blocks that must be cached on an engine."""


def longest_prefix(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine with the longest cached prefix; if short, or if the load is uneven, the least loaded.

    The rule of SGLang's cache-aware router.
    """
    most = least = engines[0].requests
    holder = engines[0]
    for engine in engines:
        most, least = max(most, engine.requests), min(least, engine.requests)
        is_equal = engine.overlap == holder.overlap
        if engine.overlap > holder.overlap or (is_equal and engine.requests < holder.requests):
            holder = engine
    is_uneven = most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least
    if is_uneven or holder.overlap < max(1.0, LEAST_MATCH * len(request.blocks)):
        return least_loaded(request, engines)
    return engines.index(holder)


def _leading(blocks: Sequence[int], cached: Container[int]) -> int:
    """Return the number of leading blocks that are cached, by bisection: cached blocks of a chain come first."""
    return bisect_left(blocks, True, key=lambda key: key not in cached)


class PrefixIndex:
    """Estimated prefix cache of each engine: an LRU of the last ``capacity_blocks`` blocks that the router sent.

    A request's blocks are added ``lag_s`` after it was sent. Evictions of the engine are not visible to the index. The
    root of a chain is always used after its leaves, so that a cached block implies all cached blocks before it.
    """

    def __init__(self, engines: int, *, capacity_blocks: int, lag_s: float = 0.0) -> None:
        self._capacity, self._lag_s = capacity_blocks, lag_s
        self._recency: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        """Block keys of each engine, least recently used first."""
        self._pending: deque[tuple[float, int, Sequence[int]]] = deque()

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Return the prefix hit of ``blocks`` on each engine, in blocks."""
        while self._pending and self._pending[0][0] <= now_s:
            _, index, pending_blocks = self._pending.popleft()
            self._touch(index, pending_blocks)
        return [_leading(blocks, recency) for recency in self._recency]

    def sent(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        """Add the blocks of a request sent to an engine; ``now_s`` never decreases."""
        if self._lag_s:
            self._pending.append((now_s + self._lag_s, index, blocks))
        else:
            self._touch(index, blocks)

    def forget(self, index: int) -> None:
        """Clear an engine's blocks, pending blocks included."""
        self._pending = deque(entry for entry in self._pending if entry[1] != index)
        self._recency[index].clear()

    def _touch(self, index: int, blocks: Sequence[int]) -> None:
        recency = self._recency[index]
        for key in reversed(blocks):
            recency[key] = None
            recency.move_to_end(key)
        while len(recency) > self._capacity:
            recency.popitem(last=False)
