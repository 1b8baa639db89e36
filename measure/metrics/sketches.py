"""Samples that add up: values with their counts, and statistics of counts by bucket. Sums are the same in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import fsum
from operator import mul
from typing import Any, Self

import numpy as np

from measure.cacheuse import Distribution
from measure.metrics.results import Statistics
from measure.metrics.statistics import LEVELS
from measure.quantiles import quantile_place
from measure.tally import SHIFT
from tracefile.records.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Different values, in order, and how often each occurs."""

    values: IntArray | FloatArray
    counts: IntArray

    @classmethod
    def of(cls, values: IntArray | FloatArray, counts: IntArray | None = None) -> Self:
        """Count values that occur once each, or so many times."""
        ordered: Any
        ordered, place = np.unique(values, return_inverse=True)
        weights = None if counts is None else counts.astype(np.float64)  # exact below 2⁵³
        return cls(ordered, np.bincount(place, weights, len(ordered)).astype(np.int64))

    def plus(self, other: Self) -> Self:
        return type(self).of(np.concatenate([self.values, other.values]), np.concatenate([self.counts, other.counts]))

    def quantiles(self, levels: Sequence[float]) -> IntArray | FloatArray:
        """Return quantiles of at least one value by the rule of sorted values."""
        up_to = np.cumsum(self.counts)
        places = [quantile_place(level, int(up_to[-1])) for level in levels]
        return self.values[np.searchsorted(up_to, places, side="right")]

    def distribution(self, unit: str, levels: tuple[float, ...]) -> Distribution:
        count = int(self.counts.sum())
        if not count:
            return Distribution(unit=unit, count=0, mean=None, quantiles=[])
        total = fsum(map(mul, self.values.tolist(), self.counts.tolist()))
        return Distribution(unit=unit, count=count, mean=total / count, quantiles=self.quantiles(levels).tolist())


class Sketch(Statistics, frozen=True, kw_only=True):
    """Statistics whose quantiles are within 0.1 % of the exact ones, from counts that add up; the rest is exact."""

    buckets: ValueCounts
    """Counts by bucket, 512 of them from a power of two to the next."""
    total: Fraction
    whole: bool
    """All values are whole numbers: so are the quantiles, and exact up to 1,023."""

    def plus(self, other: "Sketch") -> "Sketch":
        return _sketch(
            self.buckets.plus(other.buckets),
            self.total + other.total,
            (min(self.min, other.min), max(self.max, other.max)),
            whole=self.whole and other.whole,
        )

    def quantile(self, level: float) -> float:
        return _quantiles(self.buckets, (level,), (self.min, self.max), whole=self.whole)[0]

    def statistics(self) -> Statistics:
        """Return the eight numbers alone."""
        return Statistics(**{name: getattr(self, name) for name in Statistics.__struct_fields__})


def sketch_of(values: FloatArray) -> Sketch | None:
    """Return the sketch of the values that are known; null: none is."""
    values = np.asarray(values[~np.isnan(values)], np.float64)
    if not len(values):
        return None
    keys = np.abs(values).view(np.int64) >> SHIFT
    keys = np.where(values < 0, -keys, keys)
    least = int(keys.min())
    counts = np.bincount(keys - least)
    there = np.flatnonzero(counts)
    return _sketch(
        ValueCounts(there + least, counts[there]),
        Fraction(float(values.sum())),
        (float(values.min()), float(values.max())),
        whole=bool((values == np.rint(values)).all()),
    )


def _sketch(buckets: ValueCounts, total: Fraction, ends: tuple[float, float], *, whole: bool) -> Sketch:
    count = int(buckets.counts.sum())
    p50, p90, p95, p99 = _quantiles(buckets, LEVELS, ends, whole=whole)
    return Sketch(
        n=count,
        mean=float(total / count),
        min=ends[0],
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=ends[1],
        buckets=buckets,
        total=total,
        whole=whole,
    )


def _quantiles(buckets: ValueCounts, levels: Sequence[float], ends: tuple[float, float], *, whole: bool) -> list[float]:
    keys = buckets.quantiles(levels).astype(np.int64)
    size = (np.abs(keys) << SHIFT) + np.where(keys == 0, 0, 1 << (SHIFT - 1))  # the middle of a bucket
    found = np.copysign(size.view(np.float64), keys)
    clipped: list[float] = np.clip(np.trunc(found) if whole else found, *ends).tolist()
    return clipped
