"""Survival of a wait: the share of requests still without their first token (or their end) after t.

Kaplan–Meier for censored waits, generalised to competing ends (Aalen–Johansen): a failed request never gets its token.
Without failures it equals ``scipy.stats.ecdf`` of ``CensoredData``; that function takes no weights. Weights serve the
session bootstrap, which reweights one sorted sample.
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
"""The wait ended in its event."""
FAILED: Final = 1
"""Another end made the event impossible: error, upstream_abort."""
CENSORED: Final = 2
"""The client gave up (client_abort, timeout): the time of the event is unknown."""

END_OF_STATUS: Final[dict[Status, int]] = {
    "ok": EVENT,
    "error": FAILED,
    "upstream_abort": FAILED,
    "client_abort": CENSORED,
    "timeout": CENSORED,
}


@dataclass(frozen=True, slots=True)
class LatencySample:
    """A sample of n waits sorted by time; at equal times those that ended come before those given up."""

    time_ms: FloatArray
    end: npt.NDArray[np.int8]
    row: IntArray
    """Record of each wait, as a row of its run."""
    unobserved: int
    """Records without this wait (not streamed, no time), left out of the n."""

    def __len__(self) -> int:
        return len(self.time_ms)

    def count(self, end: int) -> int:
        return int(np.count_nonzero(self.end == end))

    @property
    def known_until_ms(self) -> float:
        """End of the known curve: infinite if the longest wait is not censored."""
        if not len(self) or self.end[-1] != CENSORED:
            return float("inf")
        return float(self.time_ms[-1])

    @property
    def last_ms(self) -> float:
        """Longest wait, censored or not; 0 for none."""
        return float(self.time_ms[-1]) if len(self) else 0.0


def latency_sample(time_ms: FloatArray, end: npt.NDArray[np.int8], row: IntArray, unobserved: int = 0) -> LatencySample:
    """Sort a sample by time, ends before censorings."""
    order = np.lexsort((end, time_ms))
    return LatencySample(time_ms[order], end[order], row[order], unobserved)


def pooled_waits(samples: Sequence[LatencySample]) -> LatencySample:
    """Return several samples together."""
    return latency_sample(
        np.concatenate([one.time_ms for one in samples]),
        np.concatenate([one.end for one in samples]),
        np.concatenate([one.row for one in samples]),
        sum(one.unobserved for one in samples),
    )


def incidence(waits: LatencySample, weights: npt.NDArray[np.integer[Any]] | None = None) -> FloatArray:
    """Return the share of waits with their event by each of the n sorted times; ``1 − incidence`` is the survival.

    ``weights`` of shape (replicates, n) or (n,): count of each wait; none: 1. The result has their shape. With
    failures it does not reach 1. Tied times need no grouping, the product over them telescopes.
    """
    w: npt.NDArray[Any] = np.ones(len(waits)) if weights is None else weights
    so_far = np.cumsum(w, axis=-1, dtype=np.float64)
    total = so_far[..., -1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        if waits.count(EVENT) == len(waits):
            return np.asarray(so_far / total)
        at_risk = total - (so_far - w)
        left = np.where((at_risk > 0) & (waits.end != CENSORED), w / at_risk, 0.0)
        waiting = np.cumprod(1.0 - left, axis=-1)
        if not waits.count(FAILED):
            return np.asarray(1.0 - waiting)
        before = np.concatenate([np.ones_like(total), waiting[..., :-1]], axis=-1)
        mass = np.where(waits.end == EVENT, before * left, 0.0)
    return np.asarray(np.cumsum(mass, axis=-1))


def quantiles(waits: LatencySample, share: FloatArray, levels: FloatArray) -> FloatArray:
    """Return the smallest time by which each level of ``share``, a curve (n,) of ``incidence``, is reached; or inf."""
    if not len(waits):
        return np.full(len(levels), np.inf)
    at = np.searchsorted(share, levels - ROUNDING, side="left")
    return np.where(at < len(waits), waits.time_ms[np.minimum(at, len(waits) - 1)], np.inf)


def survival_at(waits: LatencySample, share: FloatArray, times_ms: FloatArray) -> FloatArray:
    """Return the share still waiting just after each time: 1 before the first wait ends."""
    at = np.searchsorted(waits.time_ms, times_ms, side="right")
    return 1.0 - np.concatenate([[0.0], share])[at]
