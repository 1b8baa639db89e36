"""Latency histograms with fixed Prometheus buckets, for TTFT and ITL; cheap to update and to send."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

WAIT_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8),
    *(1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0),
)
"""Upper bounds of the TTFT buckets, in seconds."""
GAP_S: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds of the ITL buckets, in seconds."""

_SORTED_FROM = 48
"""Number of values from which on sorting is faster than a bisection per value."""


class HistogramCounts(msgspec.Struct, array_like=True):
    """Latency counts by bucket, the last bucket open, and the sum of the values."""

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


def empty_counts(bounds: Sequence[float]) -> HistogramCounts:
    """Return an empty histogram for ``bounds`` and an open last bucket."""
    return HistogramCounts([0] * (len(bounds) + 1))


def add_value(into: HistogramCounts, bounds: Sequence[float], value: float, times: int = 1) -> None:
    """Count a latency value ``times`` times; a bucket includes its upper bound."""
    into.counts[bisect_left(bounds, value)] += times
    into.total += value * times


def add_values(into: HistogramCounts, bounds: Sequence[float], values: Sequence[float]) -> None:
    """Count latency values."""
    if len(values) < _SORTED_FROM:
        counts = into.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
    else:
        _add_sorted(into.counts, bounds, sorted(values))
    into.total += sum(values)


def add_counts(into: HistogramCounts, other: HistogramCounts) -> None:
    """Add a histogram with equal bounds; an empty histogram may have no buckets."""
    for bucket, count in enumerate(other.counts):
        into.counts[bucket] += count
    into.total += other.total


def cumulative(bounds: Iterable[float], counts: HistogramCounts) -> list[tuple[str, float]]:
    """Return the cumulative count by upper bound; the last bound is +Inf."""
    rows, running = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts.counts, strict=True):
        running += count
        rows.append((bound, float(running)))
    return rows


def _add_sorted(counts: list[int], bounds: Sequence[float], values: list[float]) -> None:
    """Count sorted values by bisection at each bound."""
    first, done = bisect_left(bounds, values[0]), 0
    for bucket in range(first, len(bounds)):
        upto = bisect_right(values, bounds[bucket], done)
        counts[bucket] += upto - done
        done = upto
        if done == len(values):
            return
    counts[-1] += len(values) - done
