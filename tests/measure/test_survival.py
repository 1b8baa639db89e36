"""Survival against values worked out by hand, and against scipy's Kaplan–Meier on random samples."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.latency_samples import distance
from measure.resampling import draw_weights, interval, resample
from measure.survival import (
    CENSORED,
    EVENT,
    FAILED,
    LatencySample,
    incidence,
    latency_sample,
    quantiles,
    survival_at,
)

LEVELS = np.array([0.5, 0.9, 0.99])


def waits_of(*pairs: tuple[float, int]) -> LatencySample:
    times = np.array([time for time, _ in pairs], dtype=np.float64)
    return latency_sample(times, np.array([end for _, end in pairs], dtype=np.int8), np.arange(len(pairs)))


def test_kaplan_meier_by_hand() -> None:
    # Five waits, the third and the last given up: 4/5, then 3/4 of it, then (two at risk) 1/2 of that.
    waits = waits_of((10, EVENT), (20, EVENT), (25, CENSORED), (30, EVENT), (40, CENSORED))
    survival = 1.0 - incidence(waits)
    assert survival == pytest.approx([0.8, 0.6, 0.6, 0.3, 0.3])
    assert quantiles(waits, incidence(waits), LEVELS).tolist() == [30.0, np.inf, np.inf]
    assert waits.observed_until_ms == 40.0


def test_failed_request_has_no_first_token() -> None:
    # Censoring it instead would put its share on the later tokens and end at 0; as a competing end it stays at 1/4.
    waits = waits_of((10, EVENT), (20, FAILED), (30, EVENT), (40, EVENT))
    assert 1.0 - incidence(waits) == pytest.approx([0.75, 0.75, 0.5, 0.25])
    assert quantiles(waits, incidence(waits), np.array([0.75, 0.8])).tolist() == [40.0, np.inf]


def test_aalen_johansen_with_censoring_by_hand() -> None:
    # After the failure 2/3 wait on; the censored one leaves; the last carries all of what still waits.
    waits = waits_of((10, FAILED), (20, CENSORED), (30, EVENT))
    assert incidence(waits) == pytest.approx([0.0, 0.0, 2 / 3])


def censored_data(waits: LatencySample) -> Any:
    """As scipy has it."""
    from scipy import stats

    came = waits.end == EVENT
    return stats.CensoredData(uncensored=waits.time_ms[came], right=waits.time_ms[~came])


SAMPLES = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([EVENT, CENSORED])), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(SAMPLES)
def test_without_failures_equals_scipys_ecdf(pairs: list[tuple[int, int]]) -> None:
    from scipy import stats

    waits = waits_of(*pairs)
    expected = stats.ecdf(censored_data(waits)).sf.evaluate(waits.time_ms)
    assert survival_at(waits, incidence(waits), waits.time_ms) == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([EVENT, FAILED, CENSORED])), min_size=1, max_size=15),
    st.lists(st.integers(0, 3), min_size=15, max_size=15),
)
def test_a_weight_is_a_repetition(pairs: list[tuple[int, int]], weights: list[int]) -> None:
    waits = waits_of(*pairs)
    counts = np.array(weights[: len(pairs)])
    if not counts.any():
        counts[0] = 1
    repeated = latency_sample(
        np.repeat(waits.time_ms, counts), np.repeat(waits.end, counts), np.arange(int(counts.sum()))
    )
    times = np.arange(1.0, 10.0)
    weighted = survival_at(waits, incidence(waits, counts), times)
    assert weighted == pytest.approx(survival_at(repeated, incidence(repeated), times))


def test_the_bootstrap_draws_complete_sessions() -> None:
    # Two sessions of 50 equal waits each: a draw holds one, the other or both, so p50 is one of the two values only.
    times = np.repeat([10.0, 20.0], 50)
    waits = latency_sample(times, np.zeros(100, dtype=np.int8), np.arange(100))
    session = np.repeat([0, 1], 50)
    weights = draw_weights(2, 400, seed=3)
    assert set(weights.sum(axis=1).tolist()) == {2}
    result = resample(waits, session, weights, LEVELS, np.array([49]))
    assert set(result.quantiles_ms[:, 0].tolist()) == {10.0, 20.0}
    # Share still waiting after 10 ms: none, half or all of it, never in between as requests drawn alone would give.
    assert set(result.survival[:, 0].tolist()) == {0.0, 0.5, 1.0}
    low, high = interval(result.quantiles_ms)
    assert (low[0], high[0]) == (10.0, 20.0)


def test_distances_by_hand() -> None:
    # {1, 3} against {2, 6}: the curves are 1/2 apart on [1, 2) and on [3, 6), so W1 = 0.5 + 1.5.
    result = distance(waits_of((1, EVENT), (3, EVENT)), waits_of((2, EVENT), (6, EVENT)))
    assert result.w1_ms == pytest.approx(2.0)
    assert result.w1_log == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2))
    assert (result.sup, result.horizon_ms) == (0.5, None)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_uncensored_w1_equals_scipy(first: list[int], second: list[int]) -> None:
    from scipy import stats

    result = distance(waits_of(*((t, EVENT) for t in first)), waits_of(*((t, EVENT) for t in second)))
    assert result.w1_ms == pytest.approx(stats.wasserstein_distance(first, second))


def test_large_samples_are_thinned_to_their_order_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("measure.latency_samples._MOST_SAMPLES", 4)
    twelve, other = [(float(time), EVENT) for time in range(1, 13)], waits_of((20, EVENT))
    # Of twelve the middles of the quarters stay: the second, fifth, eighth and eleventh.
    retained = waits_of((2, EVENT), (5, EVENT), (8, EVENT), (11, EVENT))
    assert distance(waits_of(*twelve), other) == distance(other, waits_of(*twelve)) == distance(retained, other)
    assert distance(waits_of(*twelve[:4]), other).w1_ms == pytest.approx(20 - 2.5), "four are not too many"
    censored = waits_of(*twelve[:11], (21, CENSORED))  # a censored sample is no list of order statistics
    assert distance(censored, other).w1_ms == pytest.approx(sum(20 - time for time in range(1, 12)) / 12 + 1 / 12)
