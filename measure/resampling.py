"""Session bootstrap: what another draw of the same sessions could have shown.

Requests of a session share its prefix, its length and its moment, so they are no independent samples: intervals
resample sessions whole. The same draw serves every run, cohort and metric; a session that two runs share is drawn
for both or for neither, so that an error's interval is that of the pair and not of two strangers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.survival import Waits, incidence, quantiles
from tracefile.records.arrays import FloatArray, IntArray

CONFIDENCE = 0.90
"""Share of replicates inside every interval and band, equal tails."""
MIN_SESSIONS = 2
"""Below this there is nothing to resample: no interval is given."""
_CHUNK = 100_000
"""Weights held in floats at once: they and their sums stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Replicates:
    """What each of R bootstrap draws gave: quantiles (R, levels) and the survival curve on a grid (R, points)."""

    quantiles_ms: FloatArray
    survival: FloatArray


def draw_weights(sessions: int, replicates: int, seed: int) -> npt.NDArray[np.uint16]:
    """How often each session occurs in each draw of as many sessions with replacement; shape (replicates, sessions)."""
    generator = np.random.default_rng(seed)
    weights = np.empty((replicates, sessions), dtype=np.uint16)
    for replicate in range(replicates):
        drawn = generator.integers(0, sessions, size=sessions)
        weights[replicate] = np.bincount(drawn, minlength=sessions)
    return weights


def resample(
    waits: Waits, session_of_row: IntArray, weights: npt.NDArray[np.uint16], levels: FloatArray, points: IntArray
) -> Replicates:
    """Quantiles and survival at the sorted waits' positions ``points``, once per draw.

    A draw that holds none of the cell's sessions gives NaN and is left out of the percentiles.
    """
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
    """Lower and upper end over the first axis, ignoring NaN draws; an end may be infinite.

    Percentiles are taken as order statistics: between a number and an infinity there is nothing to interpolate.
    """
    kept = values[~np.isnan(values).any(axis=1)] if values.ndim > 1 else values[~np.isnan(values)]
    if not len(kept):
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    tail = (1.0 - CONFIDENCE) / 2
    low = np.quantile(kept, tail, axis=0, method="inverted_cdf")
    high = np.quantile(kept, 1.0 - tail, axis=0, method="inverted_cdf")
    return np.asarray(low), np.asarray(high)
