"""Repeats of a capture: errors against the mean of all captures of one load, and equivalence within a margin.

Captures of one load differ by the engine's pace, so their spread tells how well their mean is known. An error is small
enough if its whole interval lies within a margin; two captures that differ more widen it, and excuse nothing.
"""

from collections.abc import Sequence
from math import expm1, log1p, sqrt
from statistics import mean, stdev

import msgspec

from measure.resampling import t_quantile
from report.compare.results import QuantileError


def with_repeats(error: QuantileError, again: Sequence[QuantileError | None], *, is_trace: bool) -> QuantileError:
    """Add the error against the mean of the captures, its interval, their spread, and the equivalence.

    ``again``: error of each repeat against the truth. ``is_trace``: one measured run, which differs from the mean of
    its like as a capture does; an ensemble's middle is a number.
    """
    repeats = [one.signed_error for one in again if one is not None and one.signed_error is not None]
    if error.signed_error is None or not repeats:
        return _with_equivalence(error, error.low, error.high)
    logs = [0.0, *map(log1p, repeats)]
    apart = log1p(error.signed_error) - mean(logs)
    half = t_quantile(len(logs) - 1) * stdev(logs) * sqrt(1.0 / len(logs) + is_trace)
    found = msgspec.structs.replace(
        error,
        repeat_error=expm1(apart),
        repeat_low=expm1(apart - half),
        repeat_high=expm1(apart + half),
        captures=len(logs),
        repeat_spread=expm1(max(logs) - min(logs)),
    )
    return _with_equivalence(found, found.repeat_low, found.repeat_high)


def _with_equivalence(error: QuantileError, low: float | None, high: float | None) -> QuantileError:
    if low is None or high is None:
        return error
    return msgspec.structs.replace(error, equivalence=max(abs(low), abs(high)))


def mean_of_captures(truth_ms: float, error: QuantileError) -> float:
    """Return the captures' mean of a quantile that the truth has at ``truth_ms``."""
    if error.repeat_error is None or error.signed_error is None:
        return truth_ms
    return truth_ms * (1.0 + error.signed_error) / (1.0 + error.repeat_error)


def shrinkage(captures: int, fitted: int) -> float:
    """Return how much less the mean of ``captures`` differs from the mean of the fitted ones than one capture does."""
    known = 1.0 / max(fitted, 1)
    return sqrt((1.0 / captures + known) / (1.0 + known))
