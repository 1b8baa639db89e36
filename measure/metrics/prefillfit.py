"""Line through TTFT by uncached tokens: the cost of prefill in this trace, whatever engine served it.

The slope is the median of the slopes of all pairs of requests, each weighted by how far its tokens lie apart: Wilcoxon
scores (Jaeckel, 1972). A few slow requests do not move it, nor does a crowd of short ones. The intercept is the median
of what is left. The interval resamples busy periods, as those of comparisons do.
"""

from typing import Final

import numpy as np

from measure.cohorts import own_traits
from measure.metrics.requests import known
from measure.metrics.results import PrefillFit
from measure.metrics.sessions import busy_periods
from measure.quantiles import quantile
from measure.resampling import FEWEST_UNITS, draw_weights, effective_units, interval
from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

FEWEST_IDLE: Final = 20
"""Requests sent to an idle engine from which on they alone are fitted."""
MOST_FITTED: Final = 256
"""Requests in the line; more are thinned evenly: pairs go by the square."""
DRAWS: Final = 200


def told_prefills(run: Run) -> BoolArray:
    """Return True for requests with a TTFT and known uncached tokens."""
    return np.asarray(~np.isnan(run.ttft_ms) & (own_traits(run).uncached_tokens != UNKNOWN))


def sent_idle(run: Run) -> BoolArray:
    """Return True for requests that no other was in flight beside at their arrival; by times if not recorded."""
    arrivals, ends = np.sort(run.arrival_ms), np.sort(run.end_ms)
    before = np.searchsorted(arrivals, run.arrival_ms, side="left") - np.searchsorted(ends, run.arrival_ms, "right")
    return np.asarray(np.where(run.concurrency == UNKNOWN, before == 0, run.concurrency == 1))


def fit_prefill(run: Run) -> PrefillFit | None:
    """Fit the requests that found the engine idle, or all if they are fewer than 20; null: all are of one length."""
    told = told_prefills(run)
    idle = told & sent_idle(run)
    alone = int(np.count_nonzero(idle)) >= FEWEST_IDLE
    rows = np.flatnonzero(idle if alone else told)
    if alone and np.ptp(own_traits(run).uncached_tokens[rows]) == 0:
        alone, rows = False, np.flatnonzero(told)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_FITTED)).astype(np.int64))]
    tokens, ttft_ms = known(own_traits(run).uncached_tokens)[rows], run.ttft_ms[rows]
    if len(rows) < 2 or np.ptp(tokens) == 0:
        return None
    pairs = _Pairs(tokens, ttft_ms)
    slope = pairs.slope(np.ones(len(rows)))
    low, high = _slope_interval(run, rows, pairs)
    return PrefillFit(
        n=len(rows),
        idle=alone,
        idle_requests=int(np.count_nonzero(idle)),
        ms_per_1000_tokens=1000.0 * slope,
        low=None if low is None else 1000.0 * low,
        high=None if high is None else 1000.0 * high,
        intercept_ms=quantile(np.sort(ttft_ms - slope * tokens), 0.5),
        tokens_per_s=1000.0 / slope if slope > 0 else None,
    )


class _Pairs:
    """Slopes of all pairs that differ in x, sorted."""

    def __init__(self, x: FloatArray, y: FloatArray) -> None:
        first, second = np.triu_indices(len(x), 1)
        apart = x[second] - x[first]
        told = apart != 0
        self._first, self._second, apart = first[told], second[told], apart[told]
        slopes = (y[self._second] - y[self._first]) / apart
        order = np.argsort(slopes, kind="stable")
        self._slopes, self._apart = slopes[order], np.abs(apart)[order]
        self._first, self._second = self._first[order], self._second[order]

    def slope(self, weights: FloatArray) -> float:
        """Return the weighted median; NaN: no weight lies on requests that differ. ``weights``: of each request."""
        upto = np.cumsum(self._apart * weights[self._first] * weights[self._second])
        if not upto[-1]:
            return float("nan")
        return float(self._slopes[np.searchsorted(upto, upto[-1] / 2)])


def _slope_interval(run: Run, rows: IntArray, pairs: _Pairs) -> tuple[float, float] | tuple[None, None]:
    dense = np.unique(busy_periods(run)[rows], return_inverse=True)[1]
    if effective_units(dense) < FEWEST_UNITS:
        return None, None
    draws = draw_weights(int(dense.max()) + 1, DRAWS, 0)
    low, high = interval(np.array([pairs.slope(draw[dense].astype(np.float64)) for draw in draws]))
    return float(low), float(high)
