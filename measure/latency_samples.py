"""LatencySample of a run's records: first token, end, between tokens."""

from dataclasses import dataclass

import numpy as np

from measure.runs import STATUSES, Run
from measure.survival import END_OF_STATUS, EVENT, LatencySample, incidence, latency_sample, survival_at
from tracefile.records.arrays import IntArray

_ENDS = np.array([END_OF_STATUS[status] for status in STATUSES], dtype=np.int8)


def first_token_waits(run: Run, rows: IntArray) -> LatencySample:
    """TTFT of these records; a first token counts, however the request ended later."""
    came = ~np.isnan(run.ttft_ms[rows])
    end = np.where(came, EVENT, _ENDS[run.status[rows]]).astype(np.int8)
    time_ms = np.where(came, run.ttft_ms[rows], run.e2e_ms[rows])
    # Status ok without a TTFT: not streamed, or no output token. There was no wait.
    known = ~np.isnan(time_ms) & (came | (run.streamed[rows] & (end != EVENT)))
    return latency_sample(time_ms[known], end[known], rows[known], int(np.count_nonzero(~known)))


def completion_waits(run: Run, rows: IntArray) -> LatencySample:
    """End-to-end time of these records; only status ok is an event."""
    time_ms = run.e2e_ms[rows]
    known = ~np.isnan(time_ms)
    end = _ENDS[run.status[rows]]
    return latency_sample(time_ms[known], end[known], rows[known], int(np.count_nonzero(~known)))


def token_paces(run: Run, rows: IntArray) -> LatencySample:
    """TPOT of these records, from the tokens that came; never censored."""
    time_ms = run.tpot_ms[rows]
    known = ~np.isnan(time_ms)
    end = np.full(int(known.sum()), EVENT, dtype=np.int8)
    return latency_sample(time_ms[known], end, rows[known], int(np.count_nonzero(~known)))


def token_gaps(run: Run, rows: IntArray) -> LatencySample:
    """ITL of these records: each gap over its read's tokens is a sample."""
    chosen = np.zeros(len(run), dtype=np.bool_)
    chosen[rows] = True
    of_rows = chosen[run.gap_owner]
    gaps_ms = run.itl_ms[of_rows]
    return latency_sample(gaps_ms, np.zeros(len(gaps_ms), dtype=np.int8), run.gap_owner[of_rows].astype(np.int64))


_MOST_SAMPLES = 50_000
"""Larger uncensored samples (token gaps) are thinned to this many order statistics: W1 changes by < 0.1 %."""
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


def distance(truth: LatencySample, other: LatencySample) -> Distance:
    """Compare two samples of at least one wait each by the area between their curves up to the longest wait."""
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


def _thinned(waits: LatencySample) -> LatencySample:
    if len(waits) <= _MOST_SAMPLES or waits.count(EVENT) < len(waits):
        return waits
    kept = ((np.arange(_MOST_SAMPLES) + 0.5) / _MOST_SAMPLES * len(waits)).astype(np.int64)
    return LatencySample(waits.time_ms[kept], waits.end[kept], waits.row[kept], waits.unobserved)
