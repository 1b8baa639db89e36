"""Random factors on the durations of scheduler steps (``sim.latency.noise``). mypyc compiles this module."""

from math import exp, log, sqrt
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec

NORMALS: Final = 4096.0
"""Intervals of the table of standard normals; the outermost probabilities are a quarter of an interval."""
WIDEST: Final = 5.0
PER_NORMAL: Final = 128.0
"""Range of the table of log factors, in standard deviations to each side, and its intervals per standard deviation."""
LAST_INDEX: Final = 2 * 5 * 128 - 0.001
GOLDEN: Final[i64] = -7046029254386353131
MIX_1: Final[i64] = -4658895280553007687
MIX_2: Final[i64] = -7723592293110705685
"""Constants of splitmix64, as signed numbers."""


class StepNoise:
    """Noise factors of a run's scheduler steps.

    ``knots``: log(ms) of the rows of ``table``. ``table``: log(factor) by knot and normal, row-major; empty: every
    factor is 1. ``normals``: standard normals by probability. ``key``: key of the random stream, as a signed number;
    None: medians. ``weights``: weights of the autocorrelated and of the independent normal. ``correlation_ms``: time in
    which the autocorrelation falls to 1/e.
    """

    def __init__(
        self,
        *,
        knots: BoxedVec,
        table: BoxedVec,
        normals: BoxedVec,
        key: i64 | None,
        weights: tuple[float, float],
        correlation_ms: float,
    ) -> None:
        self._knots: vec[float] = knots
        self._table: vec[float] = table
        self._width: i64 = len(table) // len(knots)
        self._normals: vec[float] = normals
        self._is_random: bool = key is not None
        self._key: i64 = 0 if key is None else key
        self._slow_weight: float = weights[0]
        self._independent_weight: float = weights[1]
        self._correlation_ms: float = correlation_ms
        self._number: i64 = 0
        self._slow: float = 0.0
        """Last autocorrelated normal, at time ``_slow_at_ms``."""
        self._slow_at_ms: float = float("-inf")
        self.slowest: float = exp(max([0.0, *table]))
        """Upper bound of the factors."""

    def factor(self, start_ms: float, step_ms: float) -> float:
        """Return the noise factor of the next scheduler step, with predicted duration ``step_ms``, at ``start_ms``."""
        if self._width == 0:
            return 1.0
        normal = self._normal(start_ms) if self._is_random else 0.0
        return exp(self._step_log(normal, step_ms))

    def _normal(self, start_ms: float) -> float:
        independent = self._draw(2 * self._number)
        fresh = self._draw(2 * self._number + 1)
        correlation = exp(-(start_ms - self._slow_at_ms) / self._correlation_ms)
        self._slow = correlation * self._slow + sqrt(1.0 - correlation * correlation) * fresh
        self._slow_at_ms = start_ms
        self._number += 1
        return self._slow_weight * self._slow + self._independent_weight * independent

    def _draw(self, counter: i64) -> float:
        """Return a standard normal: splitmix64 of the counter in the random stream."""
        uniform = float(shifted(mix64(self._key + (counter + 1) * GOLDEN), 11, 0x1FFFFFFFFFFFFF)) * 2.0**-53
        position = uniform * NORMALS
        below = i64(position)
        low = self._normals[below]
        return low + (position - float(below)) * (self._normals[below + 1] - low)

    def _step_log(self, normal: float, step_ms: float) -> float:
        """Return log(observed / predicted) of a scheduler step of ``step_ms`` at a standard ``normal``."""
        knots: i64 = len(self._knots)
        position = min(max((normal + WIDEST) * PER_NORMAL, 0.0), LAST_INDEX)
        below = i64(position)
        fraction = position - float(below)
        upper: i64 = 0
        at_ms = log(max(step_ms, 1e-9))
        while upper < knots and self._knots[upper] <= at_ms:
            upper += 1
        table = self._table
        row = min(upper, knots - 1) * self._width + below
        value = table[row] + fraction * (table[row + 1] - table[row])
        if 0 < upper < knots:
            row = (upper - 1) * self._width + below
            lower = table[row] + fraction * (table[row + 1] - table[row])
            weight = (at_ms - self._knots[upper - 1]) / (self._knots[upper] - self._knots[upper - 1])
            value = lower + weight * (value - lower)
        return value


def shifted(value: i64, by: i64, mask: i64) -> i64:
    """Shift an unsigned value to the right."""
    return (value >> by) & mask


def mix64(value: i64) -> i64:
    """Mix the bits of a number as splitmix64 does; for a Python int only the low 64 bits are correct."""
    value = (value ^ shifted(value, 30, 0x3FFFFFFFF)) * MIX_1
    value = (value ^ shifted(value, 27, 0x1FFFFFFFFF)) * MIX_2
    return value ^ shifted(value, 31, 0x1FFFFFFFF)
