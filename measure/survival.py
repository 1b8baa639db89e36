"""Survival of a wait: the share of requests still without their first token (or their end) after t.

Kaplan–Meier for waits that nobody saw the end of, generalised to competing ends (Aalen–Johansen), since an error is
not a wait that might still have ended in a token. Without failures it is exactly ``scipy.stats.ecdf`` of
``CensoredData``, which tests hold it to; it is written out here because that function takes no weights, and a session
bootstrap is nothing but a reweighting of one sorted sample.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from measure.quantiles import ROUNDING
from measure.runs import STATUSES, Run
from tracefile.records.arrays import FloatArray, IntArray

EVENT: Final = 0
"""What was waited for came."""
FAILED: Final = 1
"""Something else ended the wait for good: error, upstream_abort."""
CENSORED: Final = 2
"""Nobody waited any longer: client_abort, timeout. When it would have come is unknown."""

_END_OF_STATUS: Final = np.array(
    [{"ok": EVENT, "error": FAILED, "upstream_abort": FAILED}.get(status, CENSORED) for status in STATUSES],
    dtype=np.int8,
)


@dataclass(frozen=True, slots=True)
class Waits:
    """A sample of n waits sorted by time; at equal times those that ended come before those given up."""

    time_ms: FloatArray
    end: npt.NDArray[np.int8]
    row: IntArray
    """Which of the run's records each wait belongs to."""
    unobserved: int
    """Records that say nothing about this wait (not streamed, no time), left out of the n."""

    def __len__(self) -> int:
        return len(self.time_ms)

    def count(self, end: int) -> int:
        """How many waits ended this way."""
        return int(np.count_nonzero(self.end == end))

    @property
    def known_until_ms(self) -> float:
        """Up to where the curve says anything: infinite if the longest wait has an end."""
        if not len(self) or self.end[-1] != CENSORED:
            return float("inf")
        return float(self.time_ms[-1])

    @property
    def last_ms(self) -> float:
        """The longest wait, ended or not; 0 for none."""
        return float(self.time_ms[-1]) if len(self) else 0.0


def make_waits(time_ms: FloatArray, end: npt.NDArray[np.int8], row: IntArray, unobserved: int = 0) -> Waits:
    """Sort a sample by time, ends before censorings."""
    order = np.lexsort((end, time_ms))
    return Waits(time_ms[order], end[order], row[order], unobserved)


def first_token_waits(run: Run, rows: IntArray) -> Waits:
    """TTFT of these records: a token that came counts, however the request ended later."""
    came = ~np.isnan(run.ttft_ms[rows])
    end = np.where(came, EVENT, _END_OF_STATUS[run.status[rows]]).astype(np.int8)
    time_ms = np.where(came, run.ttft_ms[rows], run.e2e_ms[rows])
    # Ended well and no first token's time: not streamed, or no token at all. It never waited for one.
    tells = ~np.isnan(time_ms) & (came | (run.streamed[rows] & (end != EVENT)))
    return make_waits(time_ms[tells], end[tells], rows[tells], int(np.count_nonzero(~tells)))


def completion_waits(run: Run, rows: IntArray) -> Waits:
    """End-to-end time of these records: only an answer that ended well is an event."""
    time_ms = run.e2e_ms[rows]
    tells = ~np.isnan(time_ms)
    end = _END_OF_STATUS[run.status[rows]]
    return make_waits(time_ms[tells], end[tells], rows[tells], int(np.count_nonzero(~tells)))


def token_paces(run: Run, rows: IntArray) -> Waits:
    """TPOT of these records: nothing censors it, it is read off the tokens that came."""
    time_ms = run.tpot_ms[rows]
    tells = ~np.isnan(time_ms)
    end = np.full(int(tells.sum()), EVENT, dtype=np.int8)
    return make_waits(time_ms[tells], end, rows[tells], int(np.count_nonzero(~tells)))


def token_gaps(run: Run, rows: IntArray) -> Waits:
    """ITL of these records: every gap of every one of them is a sample of its own."""
    chosen = np.zeros(len(run), dtype=np.bool_)
    chosen[rows] = True
    tells = chosen[run.itl_owner]
    gaps_ms = run.itl_ms[tells]
    return make_waits(gaps_ms, np.zeros(len(gaps_ms), dtype=np.int8), run.itl_owner[tells])


def incidence(waits: Waits, weights: npt.NDArray[np.integer[Any]] | None = None) -> FloatArray:
    """Share that had what it waited for by each of the n sorted times; ``1 − incidence`` is the survival curve.

    ``weights`` of shape (replicates, n) or (n,) say how often each wait counts; none: once. The result has their
    shape. With failures it does not reach 1: a failed request never gets its token (Aalen–Johansen). Times that
    tie need no grouping, the product over them telescopes.
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


def quantiles(waits: Waits, share: FloatArray, levels: FloatArray) -> FloatArray:
    """Smallest time by which each level's share had it, per level; infinite where the curve never gets there.

    ``share`` is one curve of ``incidence`` (n,). Without censoring it is the order statistic ⌈level · n⌉.
    """
    at = np.searchsorted(share, levels - ROUNDING, side="left")
    return np.where(at < len(waits), waits.time_ms[np.minimum(at, len(waits) - 1)], np.inf)


def survival_at(waits: Waits, share: FloatArray, times_ms: FloatArray) -> FloatArray:
    """Share still waiting just after each time: 1 before the first wait ends."""
    at = np.searchsorted(waits.time_ms, times_ms, side="right")
    return 1.0 - np.concatenate([[0.0], share])[at]
