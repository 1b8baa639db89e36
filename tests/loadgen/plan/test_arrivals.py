"""Arrivals: known ones by hand, and what each process is by definition, at rates that stay and rates that change."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.arrivals import (
    PARTS,
    Chunks,
    at_rate,
    before,
    evenly,
    exponentially,
    gamma,
    gamma_spaced,
    rate_profile,
)

RATES = st.floats(0, 50, allow_subnormal=False).map(lambda rate: round(rate, 3))


def one_by_one(chunks: Chunks) -> Iterator[int]:
    for chunk in chunks:
        yield from chunk.tolist()


def first(count: int, chunks: Chunks) -> list[int]:
    return list(islice(one_by_one(chunks), count))


def test_constant_arrivals_do_not_drift() -> None:
    assert first(4, at_rate(evenly(), rate_profile([(0, 3)]))) == [0, 333_333, 666_667, 1_000_000]
    # 5.0 s is no longer within 5 s.
    assert len(first(100, before(at_rate(evenly(), rate_profile([(0, 3)])), None, 5.0))) == 15
    assert first(1_000_001, at_rate(evenly(), rate_profile([(0, 1000)])))[-1] == 1_000_000_000


def test_poisson_arrivals_are_these_on_every_machine() -> None:
    assert first(4, at_rate(exponentially(seed=7), rate_profile([(0, 2)]))) == [21_696, 417_983, 996_374, 1_012_244]


def test_gamma_arrivals_are_these_on_every_machine() -> None:
    assert first(4, at_rate(gamma_spaced(7, 0.5), rate_profile([(0, 2)]))) == [1_692, 554_895, 2_127_768, 2_849_302]


def test_a_number_ends_arrivals_within_a_chunk_and_beyond_one() -> None:
    for number in (1, 1023, 1024, 1025, 5000):
        assert len(first(10_000, before(evenly(), number, None))) == number


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_mean_and_spread(burstiness: float) -> None:
    gaps = np.diff([0, *first(50_000, at_rate(gamma_spaced(1, burstiness), rate_profile([(0, 10)])))])
    # As vLLM's --burstiness: a gamma distribution of that shape, so deviation over mean is 1/√shape.
    assert gaps.mean() == pytest.approx(100_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.5, 40.0])
def test_gamma_numbers_are_gamma_distributed(shape: float) -> None:
    from scipy import stats

    drawn = gamma(5, np.arange(20_000, dtype=np.uint64), shape)
    assert stats.kstest(drawn, stats.gamma(shape).cdf).pvalue > 0.001


@pytest.mark.parametrize("shape", [0.3, 2.5])
def test_a_gamma_number_depends_on_its_position_alone(shape: float) -> None:
    all_of_them = gamma(5, np.arange(1000, dtype=np.uint64), shape)
    some = np.array([3, 999, 512], dtype=np.uint64)
    assert gamma(5, some, shape) == pytest.approx(all_of_them[[3, 999, 512]], rel=1e-12)


def test_poisson_gaps_are_exponential() -> None:
    from scipy import stats

    gaps = np.diff([0, *first(20_000, at_rate(exponentially(3), rate_profile([(0, 10)])))])
    assert stats.kstest(gaps / 100_000, stats.expon.cdf).pvalue > 0.001


def test_a_series_may_stop_and_go_on_and_end() -> None:
    arrivals = first(100, at_rate(evenly(), rate_profile([(1, 2), (2, 0), (3, 4), (4, 0)])))
    assert arrivals == [1_000_000, 1_500_000, 3_000_000, 3_250_000, 3_500_000, 3_750_000, 4_000_000]
    assert len(first(100, before(at_rate(evenly(), rate_profile([(0, 2), (1, 0)])), None, 99))) == 3


def test_plans_without_an_end_are_not_made_ahead() -> None:
    assert first(3, at_rate(exponentially(0), rate_profile([(0, 1e-3)]))) == sorted(
        first(3, at_rate(exponentially(0), rate_profile([(0, 1e-3)])))
    )
    assert PARTS == 1_000_000


@given(
    st.lists(st.tuples(st.floats(0.01, 5), RATES), min_size=1, max_size=6).filter(lambda p: any(rate for _, rate in p))
)
def test_as_many_arrive_as_the_rate_expects(gaps: list[tuple[float, float]]) -> None:
    points, at_s = [], 0.0
    for gap, rate in gaps:
        points.append((at_s, rate))
        at_s += gap
    arrivals = np.array(first(2000, before(at_rate(evenly(), rate_profile(points)), None, at_s)))
    assert np.all(np.diff(arrivals) >= 0)
    # Evenly spaced in expected arrivals: never more than one off the integral of the rate, at any time.
    for until_s in np.linspace(0, at_s, 13):
        ends = [*(start for start, _ in points[1:]), at_s]
        spans = [max(0.0, min(end, until_s) - start) for (start, _), end in zip(points, ends, strict=True)]
        expected = sum(rate * span for (_, rate), span in zip(points, spans, strict=True))
        assert abs((arrivals < until_s * 1e6).sum() - min(2000, expected)) <= 1.001


def test_a_changing_poisson_process_is_poisson_in_its_own_time() -> None:
    from scipy import stats

    arrivals = np.array(first(5000, at_rate(exponentially(2), rate_profile([(0, 1), (100, 10), (200, 100)])))) / 1e6
    # Its expected counts at the arrivals must be a unit Poisson process again.
    counts = np.interp(arrivals, [0, 100, 200, 300], [0, 100, 1100, 11_100])
    assert stats.kstest(np.diff([0, *counts]), stats.expon.cdf).pvalue > 0.001
