"""Units of resampling: literal busy periods, and intervals of queues whose quantiles are known."""

import numpy as np
import pytest

from measure.resampling import FEWEST_UNITS, busy_units, draw_weights, effective_units
from measure.survival import EVENT, LatencySample, latency_sample
from report.compare.cells import Cell, describe, measure
from tracefile.records.arrays import FloatArray


def test_sessions_that_overlap_in_the_queue_are_a_unit() -> None:
    arrival_ms = np.array([0.0, 3.0, 10.0, 12.0, 30.0, 30.0, 41.0])
    wait_ms = np.array([5.0, 4.0, 1.0, np.nan, 2.0, 20.0, 1.0])
    # 0 and 3 overlap, 10 is alone, 12 kept nobody waiting; 30, 30 and 41 are one queue.
    assert busy_units(arrival_ms, wait_ms, np.arange(7)).tolist() == [0, 0, 1, 2, 3, 3, 3]
    # A session's later turns stay with its first.
    assert busy_units(arrival_ms, wait_ms, np.array([0, 1, 2, 2, 3, 0, 1])).tolist() == [0, 0, 1, 1, 3, 0, 0]
    assert busy_units(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)).tolist() == []


def test_effective_units() -> None:
    assert effective_units(np.repeat(np.arange(5), 4)) == 5.0
    assert effective_units(np.array([0] * 9 + [1])) == pytest.approx(100 / 82)


def test_intervals_cover_a_queue() -> None:
    """Sessions taken as independent held the median in 40 of 100 runs at half load, and p99 in one of ten."""
    held, random = [], np.random.default_rng(1)
    truth_ms = np.quantile(np.concatenate([mm1(random, 0.5, 200)[1] for _ in range(1_000)]), [0.5, 0.9])
    for run in range(60):
        cell = queue_cell(random, 0.5, 200, run)
        held.append((cell.low_ms[:2] <= truth_ms) & (truth_ms <= cell.high_ms[:2]))
    assert (np.mean(held, axis=0) >= 0.8).all()


def test_saturation_has_no_interval() -> None:
    output = describe(queue_cell(np.random.default_rng(2), 1.5, 400, 0))
    assert output.effective_n < FEWEST_UNITS
    assert (output.p50.low_ms, output.p50.high_ms) == (None, None)


def test_interval_is_open_above_at_the_samples_end() -> None:
    """A hundred independent waits have one above their p99 and ten above their p90."""
    wait_ms = np.random.default_rng(3).lognormal(4.0, 0.5, 100)
    output = describe(measure(sample(wait_ms), np.arange(100), draw_weights(100, 100, 0)))
    assert output.effective_n == 100.0
    levels = (output.p50, output.p90, output.p95, output.p99)
    assert [level.high_ms is None for level in levels] == [False, False, True, True]
    assert all(level.low_ms is not None for level in levels)


def queue_cell(random: np.random.Generator, utilization: float, n: int, seed: int) -> Cell:
    arrival_ms, wait_ms = mm1(random, utilization, n)
    units = busy_units(arrival_ms, wait_ms, np.arange(n))
    return measure(sample(wait_ms), units, draw_weights(int(units.max()) + 1, 100, seed))


def mm1(random: np.random.Generator, utilization: float, n: int) -> tuple[FloatArray, FloatArray]:
    """Return arrivals and waits of one run of a queue that begins empty."""
    arrival_ms = np.cumsum(random.exponential(1.0 / utilization, n))
    done_ms = np.cumsum(service_ms := random.exponential(1.0, n))  # Lindley's recursion
    return arrival_ms, done_ms + np.maximum.accumulate(arrival_ms - done_ms + service_ms) - arrival_ms


def sample(wait_ms: FloatArray) -> LatencySample:
    return latency_sample(wait_ms, np.full(len(wait_ms), EVENT, dtype=np.int8), np.arange(len(wait_ms)))
