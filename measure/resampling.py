"""Session bootstrap: intervals from draws of whole sessions with replacement.

Requests of a session share its prefix, its length and its time, so they are no independent samples. The same draw
serves all runs, cohorts and metrics: a session that two runs share is drawn for both or for neither, so the interval of
an error is that of the pair.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.quantiles import interval_places
from measure.survival import Waits, incidence, quantiles
from tracefile.records.arrays import FloatArray, IntArray

CONFIDENCE = 0.90
"""Share of replicates inside an interval or band, with equal tails."""
MIN_SESSIONS = 2
"""With fewer sessions there is no interval."""
_CHUNK = 100_000
"""Weights in floats at once, for the processor's cache."""


@dataclass(frozen=True, slots=True)
class Replicates:
    """Results of R bootstrap draws: quantiles (R, levels) and the survival curve on a grid (R, points)."""

    quantiles_ms: FloatArray
    survival: FloatArray


def draw_weights(sessions: int, replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """Return the count of each session in each draw with replacement; shape (replicates, sessions)."""
    generator = np.random.default_rng(seed)
    weights = np.empty((replicates, sessions), dtype=np.uint16)
    for replicate in range(replicates):
        drawn = generator.integers(0, sessions, size=sessions)
        weights[replicate] = np.bincount(drawn, minlength=sessions)
    return weights


def resample(
    waits: Waits, session_of_row: IntArray, weights: npt.NDArray[np.uint16], levels: FloatArray, points: IntArray
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
