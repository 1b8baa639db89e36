"""Metrics of a run: throughput by window, and requests in flight."""

from typing import Final

import numpy as np

from measure.cohorts import recorded_traits
from measure.metrics.requests import nan_if_unknown
from measure.metrics.results import Concurrency, Rates, Timeline, Workload
from measure.quantiles import ROUNDING
from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

WINDOW_S: Final = 30.0
WARM_UP_SHARE: Final = 0.2
"""Share of wall time before the steady state."""
INTERVALS: Final = 120


def measure_workload(run: Run, gpus: int | None) -> Workload:
    """Measure token throughput and requests in flight; ``goodput`` stays null."""
    begin_ms, wall_s = wall(run)
    ok = run.ok
    cached, prompt = nan_if_unknown(run.cached_tokens), nan_if_unknown(run.prompt_tokens)
    return Workload(
        wall_s=wall_s,
        gpus=gpus,
        requests_per_s=int(np.count_nonzero(ok)) / wall_s if wall_s else None,
        prompt_tps=rates(run, prompt, gpus),
        cached_tps=rates(run, cached, gpus),
        uncached_tps=rates(run, np.maximum(prompt - cached, 0.0), gpus),
        completion_tps=rates(run, nan_if_unknown(run.output_tokens), gpus),
        concurrency=_concurrency(run, begin_ms, wall_s),
        timeline=_timeline(run, begin_ms, wall_s),
    )


def wall(run: Run) -> tuple[float, float]:
    """Return the first arrival in ms, and the seconds from there to the last end; (0, 0) if unknown."""
    if np.isnan(run.arrival_ms).all() or np.isnan(run.end_ms).all():
        return 0.0, 0.0
    begin_ms = float(np.nanmin(run.arrival_ms))
    return begin_ms, max(0.0, float(np.nanmax(run.end_ms)) - begin_ms) / 1000.0


def rates(run: Run, tokens: FloatArray, gpus: int | None) -> Rates:
    """Return token throughput of completed requests by window; tokens count at the end of a request."""
    begin_ms, wall_s = wall(run)
    counted = run.ok & ~np.isnan(tokens) & ~np.isnan(run.end_ms)
    if not wall_s or not counted.any():
        return Rates()
    ends_s, counts = (run.end_ms[counted] - begin_ms) / 1000.0, tokens[counted]
    overall = float(counts.sum()) / wall_s
    last = overall if wall_s <= WINDOW_S else float(counts[ends_s > wall_s - WINDOW_S + ROUNDING].sum()) / WINDOW_S
    warm_s = WARM_UP_SHARE * wall_s
    steady = float(counts[ends_s > warm_s + ROUNDING].sum()) / (wall_s - warm_s)
    return Rates(overall=overall, last_30s=last, steady=steady, steady_per_gpu=steady / gpus if gpus else None)


def _in_flight_time(arrivals_ms: FloatArray, ends_ms: FloatArray, until_ms: FloatArray) -> FloatArray:
    """Return ∫ requests in flight dt up to each time; both arrays sorted."""

    def since(times_ms: FloatArray) -> FloatArray:
        counts = np.searchsorted(times_ms, until_ms, side="right")
        return np.asarray(counts * until_ms - np.append(0.0, np.cumsum(times_ms))[counts])

    return np.asarray(since(arrivals_ms) - since(ends_ms))


def _spans(run: Run, begin_ms: float) -> tuple[FloatArray, FloatArray]:
    """Return sorted arrivals and sorted ends, in ms since the first arrival."""
    ended = ~np.isnan(run.end_ms)
    return np.sort(run.arrival_ms[ended] - begin_ms), np.sort(run.end_ms[ended] - begin_ms)


def _concurrency(run: Run, begin_ms: float, wall_s: float) -> Concurrency | None:
    if not wall_s:
        return None
    arrivals_ms, ends_ms = _spans(run, begin_ms)
    times_ms = np.concatenate([ends_ms, arrivals_ms])
    steps = np.repeat([-1, 1], [len(ends_ms), len(arrivals_ms)])
    order = np.argsort(times_ms, kind="stable")
    in_flight: IntArray = np.cumsum(steps[order])
    lasts_ms = np.diff(times_ms[order], append=times_ms[order[-1]])
    by_count = np.bincount(np.maximum(in_flight, 0), lasts_ms)
    upto = np.cumsum(by_count) / by_count.sum()
    p50, p90 = (int(np.searchsorted(upto, level - ROUNDING)) for level in (0.5, 0.9))
    most = int(np.flatnonzero(by_count)[-1])
    return Concurrency(mean=float((ends_ms.sum() - arrivals_ms.sum()) / (wall_s * 1000)), p50=p50, p90=p90, max=most)


def _timeline(run: Run, begin_ms: float, wall_s: float) -> Timeline | None:
    if not wall_s:
        return None
    edges_ms = np.linspace(0.0, wall_s * 1000.0, INTERVALS + 1)
    interval_ms = wall_s * 1000.0 / INTERVALS
    in_flight = np.diff(_in_flight_time(*_spans(run, begin_ms), edges_ms)) / interval_ms
    ended: BoolArray = run.ok & ~np.isnan(run.end_ms)
    since_ms = np.where(ended, run.end_ms - begin_ms, 0.0)
    intervals = np.clip((since_ms / interval_ms).astype(np.int64), 0, INTERVALS - 1)

    def per_s(counts: IntArray) -> list[float]:
        counted: BoolArray = ended & (counts != UNKNOWN)
        at = intervals[counted]
        sums = np.bincount(at, counts[counted], INTERVALS) / (interval_ms / 1000.0)
        return [float(value) for value in np.round(sums, 3)]

    return Timeline(
        interval_s=interval_ms / 1000.0,
        in_flight=[float(value) for value in np.round(np.maximum(in_flight, 0.0), 3)],
        prompt_tps=per_s(run.prompt_tokens),
        completion_tps=per_s(run.output_tokens),
        cached_tps=per_s(np.where(run.prompt_tokens == UNKNOWN, UNKNOWN, run.cached_tokens)),
        uncached_tps=per_s(recorded_traits(run).uncached_tokens),
    )
