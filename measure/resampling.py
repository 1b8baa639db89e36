"""Bootstrap of busy periods: intervals from draws, with replacement, of whole sessions that met in the engine's queue.

Requests of a session share its prefix, its length and its time, and requests in one queue share their waits, so they
are no independent samples. The same draw serves all runs, cohorts and metrics: a unit that two runs share is drawn for
both or for neither, so the interval of an error is that of the pair.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.distributions import stdtrit
from measure.quantiles import interval_places
from measure.survival import LatencySample, incidence, quantiles
from tracefile.records.arrays import FloatArray, IntArray

CONFIDENCE = 0.90
"""Share of replicates inside an interval or band, with equal tails."""
FEWEST_UNITS = 8
"""With fewer effective units there is no interval."""
FEWEST_UNITS_ABOVE = 10
"""With fewer effective units above a quantile, its interval is open above."""
_CHUNK = 100_000
"""Weights in floats at once, for the processor's cache."""


@dataclass(frozen=True, slots=True)
class Replicates:
    """Results of R bootstrap draws: quantiles (R, levels) and the survival curve on a grid (R, points)."""

    quantiles_ms: FloatArray
    survival: FloatArray


def busy_units(arrival_ms: FloatArray, wait_ms: FloatArray, session: IntArray) -> IntArray:
    """Return each row's unit: its session, and all sessions that began in the same period without an idle moment.

    ``wait_ms``: how long a request kept others waiting; NaN: not at all. ``session``: dense numbers from 0.
    """
    if not len(session):
        return session
    order = np.lexsort((np.arange(len(session)), arrival_ms))
    came = arrival_ms[order]
    free_at = np.maximum.accumulate(np.where(np.isnan(wait_ms[order]), came, came + wait_ms[order]))
    period = np.concatenate([[0], np.cumsum(came[1:] >= free_at[:-1])])
    first = np.full(int(session.max()) + 1, len(session))
    np.minimum.at(first, session[order], np.arange(len(session)))
    return np.asarray(period[first[session]])


def effective_units(unit_of_row: IntArray) -> float:
    """Return the number of equal units that tell as much as these: (Σ n)² / Σ n² over the rows of each."""
    counts = np.bincount(unit_of_row).astype(np.float64)
    return float(counts.sum() ** 2 / max((counts**2).sum(), 1.0))


def draw_weights(sessions: int, replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """Return the count of each session in each draw with replacement; shape (replicates, sessions)."""
    generator = np.random.default_rng(seed)
    weights = np.empty((replicates, sessions), dtype=np.uint16)
    for replicate in range(replicates):
        drawn = generator.integers(0, sessions, size=sessions)
        weights[replicate] = np.bincount(drawn, minlength=sessions)
    return weights


def resample(
    waits: LatencySample,
    session_of_row: IntArray,
    weights: npt.NDArray[np.uint16],
    levels: FloatArray,
    points: IntArray,
) -> Replicates:
    """Return quantiles, and survival at the sorted positions ``points``, for each draw; NaN: no session of the cell."""
    columns = session_of_row[waits.row]
    rows_at_once = max(1, _CHUNK // max(1, len(waits)))
    found_quantiles: list[FloatArray] = []
    found_survival: list[FloatArray] = []
    for start in range(0, len(weights), rows_at_once):
        drawn = weights[start : start + rows_at_once][:, columns]
        shares = incidence(waits, drawn)
        empty = ~drawn.any(axis=1)
        of_quantiles = np.array([quantiles(waits, share, levels) for share in shares])
        of_quantiles[empty] = np.nan
        found_quantiles.append(of_quantiles)
        found_survival.append(1.0 - shares[:, points])
    return Replicates(np.concatenate(found_quantiles), np.concatenate(found_survival))


def interval(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the ends over the first axis, without NaN draws; order statistics, as an end may be infinite."""
    kept = values[~np.isnan(values).any(axis=1)] if values.ndim > 1 else values[~np.isnan(values)]
    if not len(kept):
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    low, high = interval_places(CONFIDENCE, len(kept))
    kept = np.sort(kept, axis=0)
    return kept[low], kept[high]


def t_quantile(freedom: int) -> float:
    """Return how many standard errors from the mean an interval of Student's t ends."""
    return float(stdtrit(freedom, (1.0 + CONFIDENCE) / 2))
