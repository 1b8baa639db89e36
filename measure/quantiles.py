"""Quantile rule of lists, arrays, buckets and curves: of n sorted values, level q is the order statistic ⌈q · n⌉."""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # numpy would cost every process that sends or relays 30 MB
    from tracefile.records.arrays import FloatArray

ROUNDING: Final = 1e-9
"""Tolerance on a level: nine of ten values reach 0.9, despite the last bit of a float."""


def quantile_place(level: float, n: int) -> int:
    """Return the place, from 0, of the quantile among n > 0 sorted values."""
    return min(max(ceil(n * (level - ROUNDING)), 1), n) - 1


def quantile(ordered: "Sequence[float] | FloatArray", level: float) -> float:
    """Return the quantile of a sorted list or array; IndexError if it is empty."""
    return float(ordered[quantile_place(level, len(ordered))])


def interval_places(confidence: float, n: int) -> tuple[int, int]:
    """Return the places, from 0, of an interval's ends among n > 0 sorted draws: rank ⌊(n + 1) · tail⌋ and its mirror.

    Of n + 1 exchangeable values the one that was not sorted in lies between them with about that probability: of 64,
    the 3rd and the 62nd hold it in 59 of 65 cases.
    """
    low = max(floor((n + 1) * (1.0 - confidence) / 2 + ROUNDING), 1) - 1
    return low, n - 1 - low


def quantile_bucket(cumulative: Sequence[int], level: float) -> int:
    """Return the bucket that holds the quantile, from the counts up to and including each bucket."""
    return bisect_left(cumulative, quantile_place(level, cumulative[-1]) + 1)
