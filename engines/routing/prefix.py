"""A router's index of prefixes that it sent, and the policy of the longest prefix. mypyc compiles this module."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from typing import Final

from engines.routing.load import least_loaded
from engines.routing.records import RoutedEngine, RoutedRequest

IMBALANCE_REQUESTS: Final = 8
"""Requests that an engine may have more than another …"""
IMBALANCE_RATIO: Final = 1.5
"""… or as a ratio; beyond both, load decides and not the prefix. SGLang's router: 64 and 1.5."""
LEAST_MATCH: Final = 0.3
"""Least share of a prompt's full blocks that one engine must have cached."""


def longest_prefix(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine with most of the prompt cached, unless that is little or the load is uneven, as in SGLang."""
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


def _leading(blocks: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading blocks that are held; of a chain, those held come first."""
    return bisect_left(blocks, True, key=lambda key: key not in held)


class PrefixIndex:
    """Blocks that each engine is taken to hold: the ``capacity_blocks`` used last, leaf before root.

    A request's blocks count from ``lag_s`` after it was sent. The index knows what the router sent, not what an engine
    evicted. A chain's root is always used after its leaves, so an engine that holds a key holds all keys before it.
    """

    def __init__(self, engines: int, *, capacity_blocks: int, lag_s: float = 0.0) -> None:
        self._capacity, self._lag_s = capacity_blocks, lag_s
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        """Keys of each engine, the longest unused first."""
        self._coming: deque[tuple[float, int, Sequence[int]]] = deque()

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Return, by place, the leading blocks that the engine is taken to hold."""
        while self._coming and self._coming[0][0] <= now_s:
            _, place, came = self._coming.popleft()
            self._use(place, came)
        return [_leading(blocks, used) for used in self._used]

    def sent(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """Learn that a request with these blocks went to an engine; times may not go back."""
        if self._lag_s:
            self._coming.append((now_s + self._lag_s, place, blocks))
        else:
            self._use(place, blocks)

    def forget(self, place: int) -> None:
        """Empty an engine's part, requests on their way included."""
        self._coming = deque(coming for coming in self._coming if coming[1] != place)
        self._used[place].clear()

    def _use(self, place: int, blocks: Sequence[int]) -> None:
        used = self._used[place]
        for key in reversed(blocks):
            used[key] = None
            used.move_to_end(key)
        while len(used) > self._capacity:
            used.popitem(last=False)
