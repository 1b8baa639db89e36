"""Survival curve of a latency: the share of requests without their first token (or their end) after t.

Kaplan–Meier for censored latencies, generalised to competing events (Aalen–Johansen): a failed request never has a
token. Without failures it equals ``scipy.stats.ecdf`` of ``CensoredData``, which has no weights. The bootstrap by
session uses weights on a sorted sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from measure.quantiles import ROUNDING
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.schema import Status

EVENT: Final = 0
"""The event was observed: first token, or end."""
FAILED: Final = 1
"""A failure made the event impossible: error, upstream_abort."""
CENSORED: Final = 2
"""The client aborted (client_abort, timeout): the latency is unknown, and longer."""

END_OF_STATUS: Final[dict[Status, int]] = {
    "ok": EVENT,
    "error": FAILED,
    "upstream_abort": FAILED,
    "client_abort": CENSORED,
    "timeout": CENSORED,
}


@dataclass(frozen=True, slots=True)
class LatencySample:
    """Sample of n latencies sorted by time, in ms; at equal times events precede censored values."""

    time_ms: FloatArray
    end: npt.NDArray[np.int8]
    row: IntArray
    """Row of each latency's record in the run."""
    unobserved: int
    """Records without this latency (not streamed, no time); not in n."""

    def __len__(self) -> int:
        return len(self.time_ms)

    def count(self, end: int) -> int:
        return int(np.count_nonzero(self.end == end))

    @property
    def observed_until_ms(self) -> float:
        """End of the observed latency curve, in ms; infinite unless the longest latency is censored."""
        if not len(self) or self.end[-1] != CENSORED:
            return float("inf")
        return float(self.time_ms[-1])

    @property
    def last_ms(self) -> float:
        """Longest latency in ms, censored or not; 0 for an empty sample."""
        return float(self.time_ms[-1]) if len(self) else 0.0


def latency_sample(time_ms: FloatArray, end: npt.NDArray[np.int8], row: IntArray, unobserved: int = 0) -> LatencySample:
    """Return a latency sample sorted by time, events before censored values."""
    order = np.lexsort((end, time_ms))
    return LatencySample(time_ms[order], end[order], row[order], unobserved)


def pooled_sample(samples: Sequence[LatencySample]) -> LatencySample:
    """Concatenate latency samples."""
    return latency_sample(
        np.concatenate([sample.time_ms for sample in samples]),
        np.concatenate([sample.end for sample in samples]),
        np.concatenate([sample.row for sample in samples]),
        sum(sample.unobserved for sample in samples),
    )


def incidence(sample: LatencySample, weights: npt.NDArray[np.integer[Any]] | None = None) -> FloatArray:
    """Return the share of requests with their event by each of the n sorted times; survival is ``1 − incidence``.

    ``weights`` of shape (replicates, n) or (n,): count of each latency; none: 1. The result has the same shape. With
    failures it does not reach 1. Tied times need no grouping: the product over them telescopes.
    """
    w: npt.NDArray[Any] = np.ones(len(sample)) if weights is None else weights
    cumulative = np.cumsum(w, axis=-1, dtype=np.float64)
    total = cumulative[..., -1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        if sample.count(EVENT) == len(sample):
            return np.asarray(cumulative / total)
        at_risk = total - (cumulative - w)
        hazard = np.where((at_risk > 0) & (sample.end != CENSORED), w / at_risk, 0.0)
        waiting = np.cumprod(1.0 - hazard, axis=-1)
        if not sample.count(FAILED):
            return np.asarray(1.0 - waiting)
        before = np.concatenate([np.ones_like(total), waiting[..., :-1]], axis=-1)
        mass = np.where(sample.end == EVENT, before * hazard, 0.0)
    return np.asarray(np.cumsum(mass, axis=-1))


def quantiles(sample: LatencySample, share: FloatArray, levels: FloatArray) -> FloatArray:
    """Return latency quantiles: the first time at which ``share``, of ``incidence``, reaches a level; or inf."""
    if not len(sample):
        return np.full(len(levels), np.inf)
    at = np.searchsorted(share, levels - ROUNDING, side="left")
    return np.where(at < len(sample), sample.time_ms[np.minimum(at, len(sample) - 1)], np.inf)


def survival_at(sample: LatencySample, share: FloatArray, times_ms: FloatArray) -> FloatArray:
    """Return the share of requests without their event just after each time."""
    at = np.searchsorted(sample.time_ms, times_ms, side="right")
    return 1.0 - np.concatenate([[0.0], share])[at]
