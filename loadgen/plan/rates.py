"""Rates that change: how many arrivals are expected by when, and when so many are, exactly.

A rate is a straight line between points, with jumps where two points are at one time, and stays as it was after the
last. Its integral is then made of parabolas, which are solved and not stepped through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PARTS = 1_000_000
"""Into how many parts an arrival is divided: expected arrivals are counted in whole millionths."""


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Pieces in order of time; the last one never ends."""

    starts_s: Floats
    rates: Floats
    """Arrivals a second where each piece starts."""
    slopes: Floats
    """How much the rate changes a second."""
    expected: Floats
    """Arrivals expected before each piece."""

    def times_us(self, counts: Counts) -> Counts:
        """When ``counts`` millionths of arrivals are expected, in microseconds; counts that never are, are left out."""
        wanted = counts / PARTS
        piece = np.searchsorted(self.expected, wanted, side="right") - 1
        rate, slope, beyond = self.rates[piece], self.slopes[piece], wanted - self.expected[piece]
        # The root of slope/2·t² + rate·t = beyond, in the form that does not cancel; 0/0 where nothing is beyond.
        over = rate + np.sqrt(np.maximum(rate * rate + 2 * slope * beyond, 0.0))
        ever = (over > 0) | (beyond == 0)
        after = np.divide(2 * beyond, over, out=np.zeros_like(beyond), where=over > 0)
        times_us: Counts = np.rint((self.starts_s[piece] + after)[ever] * 1e6).astype(np.int64)
        return times_us


def flat(rate_per_s: float) -> RateProfile:
    """The same rate for ever."""
    return profile([(0.0, rate_per_s)])


def ramp(start_per_s: float, end_per_s: float, seconds: float) -> RateProfile:
    """A rate that changes evenly over ``seconds``."""
    return profile([(0.0, start_per_s), (seconds, end_per_s)])


def staircase(start_per_s: float, end_per_s: float, steps: int, step_s: float) -> RateProfile:
    """``steps`` equal steps of ``step_s`` each, the first at the one rate and the last at the other."""
    climb = (end_per_s - start_per_s) / (steps - 1)
    return stepped([(step * step_s, start_per_s + step * climb) for step in range(steps)])


def stepped(points: Sequence[tuple[float, float]]) -> RateProfile:
    """A rate that holds from each (time, rate) to the next."""
    corners = [(time, rate) for (start, rate), (end, _) in pairwise(points) for time in (start, end)]
    return profile([*corners, points[-1]])


def profile(points: Sequence[tuple[float, float]]) -> RateProfile:
    """A straight line from each (time, rate) to the next; no arrivals before the first, the last rate after it."""
    times = np.array([0.0, points[0][0], *(time for time, _ in points)])
    rates = np.array([0.0, 0.0, *(rate for _, rate in points)])
    lengths = np.diff(times)
    slopes = np.divide(np.diff(rates), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    expected = np.concatenate([[0.0], np.cumsum((rates[:-1] + rates[1:]) / 2 * lengths)])
    return RateProfile(times, rates, np.append(slopes, 0.0), expected)
