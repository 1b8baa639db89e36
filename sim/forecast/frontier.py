"""Choice among the points of a grid: the Pareto set, its knee, points near it, and the cheapest within the limits."""

from collections.abc import Sequence, Set
from math import log

import numpy as np

from report.sweeps.grid import EVEN, THROUGHPUT, GridPoint
from report.sweeps.pareto import pareto_set

NEAR = 1.1
"""Latency over the frontier's, at the same throughput or more, up to which a point may belong to it."""
LEAST_MS = 1e-3
"""Latency of no wait at all, which has no logarithm."""


class Frontier:
    """Points by throughput per GPU and latency without ``repeated`` ones; a throughput within ``EVEN`` is equal."""

    def __init__(self, points: Sequence[GridPoint], latency: str, repeated: Set[int] = frozenset()) -> None:
        self.points, self._latency = points, latency
        found = [None if at in repeated else self._place(point) for at, point in enumerate(points)]
        self._known = [at for at, place in enumerate(found) if place is not None]
        self._places = {at: place for at, place in enumerate(found) if place is not None}

    def _place(self, point: GridPoint) -> tuple[float, float] | None:
        """Return the logarithms, throughput in steps of ``EVEN``; None: saturated, or not all is served."""
        value, wait_ms = point.middle(THROUGHPUT), point.middle(self._latency)
        if not value or wait_ms is None or point.saturated or point.middle("unserved"):
            return None
        return round(log(value) / log(1.0 + EVEN)) * log(1.0 + EVEN), log(max(wait_ms, LEAST_MS))

    def best(self) -> list[int]:
        """Return the Pareto set, the fastest first: of equal points the one with the fewest changes."""
        kept = pareto_set([(x, -y) for x, y in self._places.values()])
        by_place: dict[tuple[float, float], int] = {}
        for at in (at for at, is_kept in zip(self._known, kept, strict=True) if is_kept):
            other = by_place.setdefault(self._places[at], at)
            if self.points[at].changes < self.points[other].changes:
                by_place[self._places[at]] = at
        return [by_place[place] for place in sorted(by_place)]

    def knee(self) -> int | None:
        """Return the place farthest below the straight line through both ends; None: fewer than three in the set."""
        best = self.best()
        if len(best) < 3:
            return None
        x, y = np.array([self._places[at] for at in best]).T
        return best[int(np.argmax((x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / (y[-1] - y[0])))]

    def near(self) -> list[int]:
        """Return the points near the Pareto set, the nearest first."""
        found: list[tuple[float, int, int]] = []
        least = np.inf
        for at in sorted(self._known, key=lambda at: (-self._places[at][0], self._places[at][1])):
            least = min(least, self._places[at][1])
            beyond = self._places[at][1] - least
            if beyond <= log(NEAR):
                found.append((beyond, self.points[at].changes, at))
        return [at for *_, at in sorted(found)]

    def choice(self, limit_ms: float | None) -> int | None:
        """Return the cheapest point at today's load that meets its SLOs and ``limit_ms``; then the fastest.

        Among equal ones that with the fewest changes. None: no point does.
        """
        slowest = np.inf if limit_ms is None else log(max(limit_ms, LEAST_MS) * (1.0 + EVEN))
        kept = [
            at
            for at, (_, y) in self._places.items()
            if self.points[at].meets and self.points[at].same_load and y <= slowest
        ]
        if not kept:
            return None
        value_of = {at: self.points[at].middle(THROUGHPUT) or 0.0 for at in kept}
        least = max(value_of.values()) / (1.0 + EVEN)
        kept = [at for at in kept if value_of[at] >= least]
        fastest = min(self._places[at][1] for at in kept) + log(1.0 + EVEN)
        even = (at for at in kept if self._places[at][1] <= fastest)
        return min(even, key=lambda at: (self.points[at].changes, self._places[at][1], at))
