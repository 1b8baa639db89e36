"""Latency samples of a run: TTFT, E2E latency, TPOT and ITL, in ms."""

from dataclasses import dataclass

import numpy as np

from measure.runs import STATUSES, Run
from measure.survival import END_OF_STATUS, EVENT, LatencySample, incidence, latency_sample, survival_at
from tracefile.records.arrays import IntArray

_ENDS = np.array([END_OF_STATUS[status] for status in STATUSES], dtype=np.int8)


def ttft_sample(run: Run, rows: IntArray) -> LatencySample:
    """Return the TTFT latency sample of ``rows``; a first token counts, whatever the later end of the request."""
    has_token = ~np.isnan(run.ttft_ms[rows])
    end = np.where(has_token, EVENT, _ENDS[run.status[rows]]).astype(np.int8)
    time_ms = np.where(has_token, run.ttft_ms[rows], run.e2e_ms[rows])
    # Status ok without a TTFT: not streamed, or no output token. No latency sample.
    observed = ~np.isnan(time_ms) & (has_token | (run.streamed[rows] & (end != EVENT)))
    return latency_sample(time_ms[observed], end[observed], rows[observed], int(np.count_nonzero(~observed)))


def e2e_sample(run: Run, rows: IntArray) -> LatencySample:
    """Return the E2E latency sample of ``rows``; only status ok is an event."""
    time_ms = run.e2e_ms[rows]
    observed = ~np.isnan(time_ms)
    end = _ENDS[run.status[rows]]
    return latency_sample(time_ms[observed], end[observed], rows[observed], int(np.count_nonzero(~observed)))


def tpot_sample(run: Run, rows: IntArray) -> LatencySample:
    """Return the TPOT sample of ``rows``, over the received tokens; never censored."""
    time_ms = run.tpot_ms[rows]
    observed = ~np.isnan(time_ms)
    end = np.full(int(observed.sum()), EVENT, dtype=np.int8)
    return latency_sample(time_ms[observed], end, rows[observed], int(np.count_nonzero(~observed)))


def itl_sample(run: Run, rows: IntArray) -> LatencySample:
    """Return the ITL sample of ``rows``: each gap divided by the tokens of its read."""
    chosen = np.zeros(len(run), dtype=np.bool_)
    chosen[rows] = True
    of_rows = chosen[run.gap_owner]
    gaps_ms = run.itl_ms[of_rows]
    return latency_sample(gaps_ms, np.zeros(len(gaps_ms), dtype=np.int8), run.gap_owner[of_rows].astype(np.int64))


_MOST_SAMPLES = 50_000
"""Larger uncensored samples (ITL) are thinned to this number of order statistics: W1 changes by < 0.1 %."""
_SHORTEST_MS = 1e-3
"""Shortest latency on the log axis: a microsecond, the resolution of the clock."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Distances between two latency curves, up to ``horizon_ms`` if a curve ends in a censored value."""

    w1_ms: float
    w1_log: float
    sup: float
    horizon_ms: float | None
    """Null: both curves are complete."""


def distance(truth: LatencySample, other: LatencySample) -> Distance:
    """Compare two non-empty latency samples by the area between their curves, up to the longest latency."""
    truth, other = _thinned(truth), _thinned(other)
    observed_until = min(truth.observed_until_ms, other.observed_until_ms)
    end_ms = min(observed_until, max(truth.last_ms, other.last_ms))
    times = np.unique(np.concatenate([truth.time_ms, other.time_ms, [end_ms]]))
    times = times[times <= end_ms]
    apart = np.abs(survival_at(truth, incidence(truth), times) - survival_at(other, incidence(other), times))
    clock = np.maximum(times, _SHORTEST_MS)
    return Distance(
        w1_ms=float(np.sum(apart[:-1] * np.diff(times))),
        w1_log=float(np.sum(apart[:-1] * np.diff(np.log(clock)))),
        sup=float(apart.max(initial=0.0)),
        horizon_ms=float(observed_until) if np.isfinite(observed_until) else None,
    )


def _thinned(sample: LatencySample) -> LatencySample:
    if len(sample) <= _MOST_SAMPLES or sample.count(EVENT) < len(sample):
        return sample
    rows = ((np.arange(_MOST_SAMPLES) + 0.5) / _MOST_SAMPLES * len(sample)).astype(np.int64)
    return LatencySample(sample.time_ms[rows], sample.end[rows], sample.row[rows], sample.unobserved)
