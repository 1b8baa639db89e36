"""Drift: how far the speed of captures differs beyond what a model explains, and the intervals that it widens."""

from dataclasses import dataclass
from math import expm1, hypot, sqrt

import numpy as np

from measure.distributions import stdtrit
from sim.fit.observations import Observations
from tracefile.records.arrays import FloatArray, IntArray

INTERVAL = (0.025, 0.975)
_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Drift:
    """Standard deviation of log(speed) between captures, and its degrees of freedom; 0: nothing was seen."""

    log_sd: float
    freedom: int


def estimate_drift(seen: Observations, parameters: FloatArray) -> Drift:
    """Estimate drift from log(speed) between k captures; of one capture, from its quarters: a lower bound.

    The spread within captures tells nothing of the spread between them, so it is left out from two captures on.
    """
    captures = int(seen.capture.max(initial=-1)) + 1
    blocks = [np.flatnonzero(seen.capture == number) for number in range(captures)]
    if captures == 1:
        blocks = [block for block in np.array_split(blocks[0], _BLOCKS) if len(block)]
    if len(blocks) < 2:
        return Drift(0.0, 0)
    variance = float(np.var([speed(seen, parameters, block) for block in blocks], ddof=1))
    # The captures' own mean is off by a share of it, and so is the fit that goes through them.
    return Drift(round(float(np.sqrt(variance * (1.0 + 1.0 / captures))), 6), len(blocks) - 1)


def speed(seen: Observations, parameters: FloatArray, rows: IntArray | None = None) -> float:
    """Median log(seen / predicted), of all intervals or of ``rows``: the middle of that of prefills and of decodes."""
    some = np.arange(len(seen.seen_ms)) if rows is None else rows
    log_ratio = np.log(seen.seen_ms[some] / np.maximum(seen.counts[some] @ parameters, 1e-6))
    is_prefill = seen.is_prefill[some]
    return float(np.mean([np.median(log_ratio[group]) for group in (is_prefill, ~is_prefill) if group.any()]))


def drift_of_mean(drift: Drift, captures: int) -> float:
    """Return how far the mean log(speed) of the captures may be from the engine's, at the ends of ``INTERVAL``.

    One capture does not tell: 0.
    """
    return float(stdtrit(captures - 1, INTERVAL[1])) * drift.log_sd / sqrt(captures + 1) if captures > 1 else 0.0


def widened(value: float, low: float, high: float, drift: float) -> tuple[float, float]:
    """Return the interval of a parameter, wider by a speed of all costs that is known to ``drift``, and not below 0."""
    below, above = hypot(value - low, value * -expm1(-drift)), hypot(high - value, value * expm1(drift))
    return max(value - below, 0.0), value + above
