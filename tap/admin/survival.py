"""TTFT survival of the last minutes: the share of requests still without their first token after t, by cohort.

The curve is that of ``measure.survival``, over waits counted in time buckets 5 % apart: exact at the bounds unless a
censoring precedes an end in the same bucket. Requests that end in a bucket count as at risk throughout it.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from measure.cohorts import MAIN, UNCACHED, record_cohorts
from measure.survival import (
    CENSORED,
    END_OF_STATUS,
    EVENT,
    FAILED,
    Waits,
    incidence,
    incidence_variance,
    quantiles,
)
from tap.admin.timeline import Window
from tap.ipc.feed import SeenRecord
from tracefile.records.arrays import FloatArray, IntArray

FIRST_MS: Final = 0.1
LAST_MS: Final = 600_000.0
STEP: Final = 1.05
BOUNDS_MS: Final = tuple(
    FIRST_MS * STEP**step for step in range(math.ceil(math.log(LAST_MS / FIRST_MS) / math.log(STEP)) + 1)
)
"""Upper bounds of the time buckets; one more bucket is beyond them."""
_TIMES_MS: Final = np.array([*BOUNDS_MS, BOUNDS_MS[-1]])
_ENDS: Final = (EVENT, FAILED, CENSORED)
_BUCKETS: Final = Waits(
    np.repeat(_TIMES_MS, len(_ENDS)),
    np.tile(np.array(_ENDS, np.int8), len(_TIMES_MS)),
    np.zeros(len(_TIMES_MS) * len(_ENDS), np.int64),
    0,
)
"""One wait for each bucket and end; the counts are its weights."""
MIN_JUDGED: Final = 30
LEVELS: Final = (0.5, 0.9, 0.99)
_Z: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Survival:
    """Curve of one cohort."""

    n: int
    censored: int
    failed: int
    times_ms: list[float]
    waiting: list[float]
    """Share still without a first token just after each time."""
    low: list[float]
    high: list[float]
    """Pointwise 95 % band, requests taken as independent."""
    quantiles_ms: list[float | None]
    """TTFT at each of ``LEVELS``; null: later than was seen."""
    known_until_ms: float
    """Bound of the longest wait's bucket."""


def no_waits() -> IntArray:
    return np.zeros((len(_TIMES_MS), len(_ENDS)), np.int64)


def count_wait(counts: IntArray, time_ms: float, end: int) -> None:
    counts[bisect_left(BOUNDS_MS, time_ms), end] += 1


def wait_of(record: SeenRecord) -> tuple[float, int] | None:
    """Return a request's wait for its first token in ms, and its end; null if there was no wait."""
    if record.ttft_ms is not None:
        return record.ttft_ms, EVENT
    if not record.stream or record.e2e_ms is None or record.status == "ok":
        return None
    return record.e2e_ms, END_OF_STATUS[record.status]


def cohorts_of(record: SeenRecord) -> list[str]:
    known = record.prompt_tokens is not None and record.cached_tokens is not None
    return record_cohorts(record.turn, (record.prompt_tokens or 0) - (record.cached_tokens or 0) if known else None)


class SurvivalCurves:
    """Waits of the recent records, and their curves."""

    def __init__(self) -> None:
        self._windows = {name: Window(no_waits) for name in (*MAIN, *UNCACHED)}

    def take(self, record: SeenRecord, now_s: float) -> None:
        wait = wait_of(record)
        if wait is not None:
            for name in cohorts_of(record):
                count_wait(self._windows[name].bucket(now_s), *wait)

    def recent(self, now_s: float) -> dict[str, Survival]:
        recent = {name: sum(window.buckets(now_s), no_waits()) for name, window in self._windows.items()}
        return {name: survival(counts) for name, counts in recent.items() if counts.any()}


def survival(counts: IntArray) -> Survival:
    shares = incidence(_BUCKETS, counts.ravel())
    reached = quantiles(_BUCKETS, shares, np.array(LEVELS))
    share = shares.reshape(counts.shape)[:, EVENT]
    steps = np.flatnonzero(counts[:, EVENT])
    below, above = _band(share[steps], incidence_variance(*counts.T)[steps])
    return Survival(
        n=int(counts.sum()),
        censored=int(counts[:, CENSORED].sum()),
        failed=int(counts[:, FAILED].sum()),
        times_ms=_TIMES_MS[steps].tolist(),
        waiting=(1 - share[steps]).tolist(),
        low=(1 - above).tolist(),
        high=(1 - below).tolist(),
        quantiles_ms=[None if math.isinf(at_ms) else at_ms for at_ms in reached.tolist()],
        known_until_ms=float(_TIMES_MS[np.flatnonzero(counts.any(axis=1))[-1]]),
    )


def _band(share: FloatArray, variance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the ends of 95 % intervals of shares, made on the log-odds so that they stay within 0 and 1."""
    inside = (share > 0) & (share < 1) & (variance > 0)
    known = np.where(inside, share, 0.5)
    odds = np.log(known / (1 - known))
    spread = _Z * np.sqrt(variance) / (known * (1 - known))
    ends = [1 / (1 + np.exp(-np.clip(odds + side * spread, -700.0, 700.0))) for side in (-1, 1)]
    return np.where(inside, ends[0], share), np.where(inside, ends[1], share)
