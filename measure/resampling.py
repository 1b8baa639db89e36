"""Bootstrap intervals of latency statistics: draws, with replacement, of busy periods (sessions that met in the queue).

Requests of a session share a prefix, and requests in a queue share their queue time, so they are not independent. All
runs, cohorts and metrics use the same draws: a unit in two runs is drawn for both or for neither, so the interval of an
error is the interval of the paired difference.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.distributions import stdtrit
from measure.quantiles import interval_indices
from measure.survival import LatencySample, incidence, quantiles
from tracefile.records.arrays import FloatArray, IntArray

CONFIDENCE = 0.90
"""Share of replicates inside an interval or band, with equal tails."""
FEWEST_UNITS = 8
"""Fewest effective units of an interval."""
FEWEST_UNITS_ABOVE = 10
"""Fewest effective units above a quantile; with fewer its interval has no upper end."""
_CHUNK = 100_000
"""Weights processed at a time, to fit the CPU cache."""


@dataclass(frozen=True, slots=True)
class Replicates:
    """Results of R bootstrap draws: latency quantiles (R, levels) and the survival curve on a grid (R, points)."""

    quantiles_ms: FloatArray
    survival: FloatArray


def busy_units(arrival_ms: FloatArray, wait_ms: FloatArray, session: IntArray) -> IntArray:
    """Return the bootstrap unit of each row: sessions that began in the same busy period are a unit.

    ``wait_ms``: time in which a request may delay others; NaN: none. ``session``: dense numbers from 0.
    """
    if not len(session):
        return session
    order = np.lexsort((np.arange(len(session)), arrival_ms))
    sorted_ms = arrival_ms[order]
    idle_ms = np.maximum.accumulate(np.where(np.isnan(wait_ms[order]), sorted_ms, sorted_ms + wait_ms[order]))
    period = np.concatenate([[0], np.cumsum(sorted_ms[1:] >= idle_ms[:-1])])
    first = np.full(int(session.max()) + 1, len(session))
    np.minimum.at(first, session[order], np.arange(len(session)))
    return np.asarray(period[first[session]])


def effective_units(unit_of_row: IntArray) -> float:
    """Return the effective number of units, (Σ n)² / Σ n² over their rows n."""
    counts = np.bincount(unit_of_row).astype(np.float64)
    return float(counts.sum() ** 2 / max((counts**2).sum(), 1.0))


def draw_weights(sessions: int, replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """Return how often each draw has each session, shape (replicates, sessions)."""
    generator = np.random.default_rng(seed)
    weights = np.empty((replicates, sessions), dtype=np.uint16)
    for replicate in range(replicates):
        draw = generator.integers(0, sessions, size=sessions)
        weights[replicate] = np.bincount(draw, minlength=sessions)
    return weights


def resample(
    sample: LatencySample,
    session_of_row: IntArray,
    weights: npt.NDArray[np.uint16],
    levels: FloatArray,
    points: IntArray,
) -> Replicates:
    """Return latency quantiles and survival at the sorted positions ``points`` for each draw; NaN: empty cell."""
    columns = session_of_row[sample.row]
    rows_at_once = max(1, _CHUNK // max(1, len(sample)))
    quantile_chunks: list[FloatArray] = []
    survival_chunks: list[FloatArray] = []
    for start in range(0, len(weights), rows_at_once):
        counts = weights[start : start + rows_at_once][:, columns]
        shares = incidence(sample, counts)
        quantile_rows = np.array([quantiles(sample, share, levels) for share in shares])
        quantile_rows[~counts.any(axis=1)] = np.nan
        quantile_chunks.append(quantile_rows)
        survival_chunks.append(1.0 - shares[:, points])
    return Replicates(np.concatenate(quantile_chunks), np.concatenate(survival_chunks))


def interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the interval's ends over the first axis, without NaN draws; an end may be infinite."""
    draws = values[~np.isnan(values).any(axis=1)] if values.ndim > 1 else values[~np.isnan(values)]
    if not len(draws):
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    low, high = interval_indices(CONFIDENCE, len(draws))
    draws = np.sort(draws, axis=0)
    return draws[low], draws[high]


def t_quantile(freedom: int) -> float:
    """Return the half width of a Student's t interval, in standard errors."""
    return float(stdtrit(freedom, (1.0 + CONFIDENCE) / 2))
