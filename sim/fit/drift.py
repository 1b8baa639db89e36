"""Drift: unexplained speed difference between captures, and the parameter intervals that it widens."""

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
    """Standard deviation of log(speed) between captures, and its degrees of freedom; 0: no estimate."""

    log_sd: float
    freedom: int


def estimate_drift(observed: Observations, parameters: FloatArray) -> Drift:
    """Estimate drift from log(speed) of k captures; of one capture, from its quarters: a lower bound.

    Spread within a capture does not bound spread between captures, so two captures and more use only the latter.
    """
    captures = int(observed.capture.max(initial=-1)) + 1
    blocks = [np.flatnonzero(observed.capture == number) for number in range(captures)]
    if captures == 1:
        blocks = [block for block in np.array_split(blocks[0], _BLOCKS) if len(block)]
    if len(blocks) < 2:
        return Drift(0.0, 0)
    variance = float(np.var([speed(observed, parameters, block) for block in blocks], ddof=1))
    # The mean of k captures, and so the fit, is itself off by 1/k of the variance.
    return Drift(round(float(np.sqrt(variance * (1.0 + 1.0 / captures))), 6), len(blocks) - 1)


def speed(observed: Observations, parameters: FloatArray, rows: IntArray | None = None) -> float:
    """Return the mean of the median log(measured / predicted) of prefills and of decodes; ``rows``: a subset."""
    selected = np.arange(len(observed.measured_ms)) if rows is None else rows
    log_ratio = np.log(observed.measured_ms[selected] / np.maximum(observed.counts[selected] @ parameters, 1e-6))
    is_prefill = observed.is_prefill[selected]
    return float(np.mean([np.median(log_ratio[group]) for group in (is_prefill, ~is_prefill) if group.any()]))


def drift_of_mean(drift: Drift, captures: int) -> float:
    """Return the error of the captures' mean log(speed) at the ends of ``INTERVAL``; 0 for a single capture."""
    return float(stdtrit(captures - 1, INTERVAL[1])) * drift.log_sd / sqrt(captures + 1) if captures > 1 else 0.0


def widened(value: float, low: float, high: float, drift: float) -> tuple[float, float]:
    """Return a parameter interval widened by the drift of the speed, at least 0."""
    below, above = hypot(value - low, value * -expm1(-drift)), hypot(high - value, value * expm1(drift))
    return max(value - below, 0.0), value + above
