"""Noise factors on the durations of scheduler steps, in plain Python."""

import math
from collections.abc import Sequence

from sim.latency.noise import Noise, normals_table, step_knots, step_table, stream, weights
from sim.latency.stepnoise import NORMALS, PER_NORMAL, WIDEST
from tracefile.hashing.splitmix64 import GOLDEN, mix64
from tracefile.records.arrays import FloatArray

Numbers = Sequence[float] | FloatArray

_LAST_POSITION = 2 * WIDEST * PER_NORMAL - 0.001
_STEPS = b"\0steps"


def uniform(key: int, counter: int) -> float:
    """Draw a number from 0 to below 1: splitmix64 of the counter in the stream ``key``."""
    return (mix64(key + (counter + 1) * GOLDEN) >> 11) * 2.0**-53


class StepNoise:
    """Noise factors of a run's scheduler steps. ``seed`` None: medians."""

    __slots__ = (
        "_correlation_ms",
        "_key",
        "_knots",
        "_normals",
        "_number",
        "_slow",
        "_slow_at_ms",
        "_table",
        "_weights",
    )

    def __init__(self, noise: Noise, seed: int | None) -> None:
        self._knots: list[float] = step_knots(noise).tolist()
        self._table: list[list[float]] = step_table(noise).tolist()
        self._key = None if seed is None else stream(seed, _STEPS)
        self._weights = weights(noise)
        self._correlation_ms = noise.correlation_time_ms
        self._normals: list[float] = normals_table().tolist()
        self._number, self._slow, self._slow_at_ms = 0, 0.0, -math.inf

    def factor(self, start_ms: float, step_ms: float) -> float:
        if not self._table:
            return 1.0
        return math.exp(step_log(self._knots, self._table, self._normal(start_ms), step_ms))

    def _normal(self, start_ms: float) -> float:
        if self._key is None:
            return 0.0
        local = at(self._normals, uniform(self._key, 2 * self._number) * NORMALS)
        fresh = at(self._normals, uniform(self._key, 2 * self._number + 1) * NORMALS)
        retained = math.exp(-(start_ms - self._slow_at_ms) / self._correlation_ms)
        self._slow = retained * self._slow + math.sqrt(1.0 - retained * retained) * fresh
        self._slow_at_ms = start_ms
        self._number += 1
        return self._weights[0] * self._slow + self._weights[1] * local


def step_log(knots: Numbers, table: Sequence[Sequence[float]] | FloatArray, normal: float, step_ms: float) -> float:
    """log(observed / predicted) of a step of ``step_ms`` at a ``normal``; compiled too, so plain."""
    position = min(max((normal + WIDEST) * PER_NORMAL, 0.0), _LAST_POSITION)
    below = int(position)
    share = position - below
    upper = 0
    at_ms = math.log(max(step_ms, 1e-9))
    while upper < len(knots) and knots[upper] <= at_ms:
        upper += 1
    first = table[min(upper, len(knots) - 1)]
    value = first[below] + share * (first[below + 1] - first[below])
    if 0 < upper < len(knots):
        row = table[upper - 1]
        lower = row[below] + share * (row[below + 1] - row[below])
        weight = (at_ms - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
        value = lower + weight * (value - lower)
    return float(value)


def at(table: Numbers, position: float) -> float:
    """Interpolate ``table`` at ``position``, from 0 to below its last entry's; compiled too, so plain."""
    below = int(position)
    low = table[below]
    return float(low + (position - below) * (table[below + 1] - low))
