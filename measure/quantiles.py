"""Quantile rule of all latency statistics: level q of n sorted values is the order statistic ⌈q · n⌉."""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # numpy would cost every process that sends or relays 30 MB
    from tracefile.records.arrays import FloatArray

ROUNDING: Final = 1e-9
"""Tolerance on a level: nine of ten values reach level 0.9, despite float rounding."""


def quantile_index(level: float, n: int) -> int:
    """Return the index of the quantile among n > 0 sorted values."""
    return min(max(ceil(n * (level - ROUNDING)), 1), n) - 1


def quantile(ordered: "Sequence[float] | FloatArray", level: float) -> float:
    """Return the latency quantile of a sorted list or array; IndexError if it is empty."""
    return float(ordered[quantile_index(level, len(ordered))])


def interval_indices(confidence: float, n: int) -> tuple[int, int]:
    """Return the indices of the interval's ends among n > 0 sorted draws: rank ⌊(n + 1) · tail⌋ and its mirror.

    A further exchangeable value is inside with about this probability: for n = 64 and 90 %, between the 3rd and the
    62nd draw in 59 of 65 cases.
    """
    low = max(floor((n + 1) * (1.0 - confidence) / 2 + ROUNDING), 1) - 1
    return low, n - 1 - low


def quantile_bucket(cumulative: Sequence[int], level: float) -> int:
    """Return the bucket of the latency quantile, from cumulative counts by bucket."""
    return bisect_left(cumulative, quantile_index(level, cumulative[-1]) + 1)
