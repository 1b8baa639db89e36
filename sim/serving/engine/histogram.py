"""Counts by size, as Prometheus wants them."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""Upper bounds of the buckets of every histogram here, seconds."""


class Histogram:
    """Values and their sum, bucketed by upper bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many values up to it), the last bound being +Inf."""
        rows, running = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows
