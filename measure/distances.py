"""Distances between two survival curves: Wasserstein-1 in ms and on the log axis, and their largest gap."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from measure.survival import EVENT, Waits, incidence, survival_at

_MOST_SAMPLES = 50_000
"""Larger uncensored samples (token gaps) are compared by this many order statistics: W1 changes by far less than
a thousandth, and the work is bounded."""
_SHORTEST_MS = 1e-3
"""Shortest wait on the log axis: a microsecond is a clock's tick."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Distances between two curves, up to ``horizon_ms`` if one of them ends in a censored wait."""

    w1_ms: float
    w1_log: float
    sup: float
    horizon_ms: float | None
    """Null: both curves are known to the end."""


def distance(truth: Waits, other: Waits) -> Distance:
    """Compare two samples of at least one wait each.

    W1 is the area between the curves. Where failures keep a curve above 0, the area ends at the longest wait of either;
    without failures and censoring it is ``scipy.stats.wasserstein_distance``.
    """
    truth, other = _thinned(truth), _thinned(other)
    known_until = min(truth.known_until_ms, other.known_until_ms)
    end_ms = min(known_until, max(truth.last_ms, other.last_ms))
    times = np.unique(np.concatenate([truth.time_ms, other.time_ms, [end_ms]]))
    times = times[times <= end_ms]
    apart = np.abs(survival_at(truth, incidence(truth), times) - survival_at(other, incidence(other), times))
    clock = np.maximum(times, _SHORTEST_MS)
    return Distance(
        w1_ms=float(np.sum(apart[:-1] * np.diff(times))),
        w1_log=float(np.sum(apart[:-1] * np.diff(np.log(clock)))),
        sup=float(apart.max(initial=0.0)),
        horizon_ms=float(known_until) if np.isfinite(known_until) else None,
    )


def logrank_p(truth: Waits, other: Waits) -> float | None:
    """Return the two-sided p of the log-rank test over independent requests; null if there is no event to compare."""
    if not truth.count(EVENT) or not other.count(EVENT):
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        # Where all waits tie there is no variance to test against: scipy divides 0 by 0.
        result = stats.logrank(_censored_data(truth), _censored_data(other))
    return float(result.pvalue) if np.isfinite(result.pvalue) else None


def _thinned(waits: Waits) -> Waits:
    if len(waits) <= _MOST_SAMPLES or waits.count(EVENT) < len(waits):
        return waits
    kept = ((np.arange(_MOST_SAMPLES) + 0.5) / _MOST_SAMPLES * len(waits)).astype(np.int64)
    return Waits(waits.time_ms[kept], waits.end[kept], waits.row[kept], waits.unobserved)


def _censored_data(waits: Waits) -> stats.CensoredData:
    came = waits.end == EVENT
    return stats.CensoredData(uncensored=waits.time_ms[came], right=waits.time_ms[~came])
