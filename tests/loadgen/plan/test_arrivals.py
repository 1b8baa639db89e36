"""Arrivals: known ones by hand, and what each process is by definition, at rates that stay and rates that change."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.arrivals import (
    PARTS,
    Chunks,
    RateProfile,
    at_rate,
    before,
    bursts,
    evenly,
    exponentially,
    flat,
    gamma,
    gamma_spaced,
    profile,
    ramp,
    staircase,
    stepped,
)

RATES = st.floats(0, 50, allow_subnormal=False).map(lambda rate: round(rate, 3))


def one_by_one(chunks: Chunks) -> Iterator[int]:
    for chunk in chunks:
        yield from chunk.tolist()


def first(count: int, chunks: Chunks) -> list[int]:
    return list(islice(one_by_one(chunks), count))


def test_constant_arrivals_do_not_drift() -> None:
    assert first(4, at_rate(evenly(), flat(3))) == [0, 333_333, 666_667, 1_000_000]
    # 5.0 s is no longer within 5 s.
    assert len(first(100, before(at_rate(evenly(), flat(3)), None, 5.0))) == 15
    assert first(1_000_001, at_rate(evenly(), flat(1000)))[-1] == 1_000_000_000


def test_poisson_arrivals_are_these_on_every_machine() -> None:
    assert first(4, at_rate(exponentially(seed=7), flat(2))) == [21_696, 417_983, 996_374, 1_012_244]


def test_gamma_arrivals_are_these_on_every_machine() -> None:
    assert first(4, at_rate(gamma_spaced(7, 0.5), flat(2))) == [1_692, 554_895, 2_127_768, 2_849_302]


def test_bursts() -> None:
    assert first(5, bursts(2, 0.5)) == [0, 0, 500_000, 500_000, 1_000_000]
    assert len(first(10_000, before(bursts(1000, 0.25), None, 1.0))) == 4000


def test_a_number_ends_arrivals_within_a_chunk_and_beyond_one() -> None:
    for number in (1, 1023, 1024, 1025, 5000):
        assert len(first(10_000, before(evenly(), number, None))) == number


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_mean_and_spread(burstiness: float) -> None:
    gaps = np.diff([0, *first(50_000, at_rate(gamma_spaced(1, burstiness), flat(10)))])
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

    gaps = np.diff([0, *first(20_000, at_rate(exponentially(3), flat(10)))])
    assert stats.kstest(gaps / 100_000, stats.expon.cdf).pvalue > 0.001


def test_a_ramp_from_nothing_has_arrivals_at_the_roots() -> None:
    # Rate t/s, so t²/2 expected by t: the nth at √(2n).
    arrivals = first(6, before(at_rate(evenly(), ramp(0, 10, 10)), None, 10))
    assert arrivals == [0, 1_414_214, 2_000_000, 2_449_490, 2_828_427, 3_162_278]
    assert len(first(100, before(at_rate(evenly(), ramp(0, 10, 10)), None, 10))) == 50


def test_a_ramp_down_is_a_ramp_up_backwards() -> None:
    up = first(50, before(at_rate(evenly(), ramp(0, 10, 10)), None, 10))
    down = first(51, at_rate(evenly(), ramp(10, 0, 10)))
    assert [10_000_000 - at for at in reversed(down)][:50] == pytest.approx(up, abs=1)


def test_a_staircase_holds_each_rate_for_its_time() -> None:
    arrivals = np.array(first(1000, before(at_rate(evenly(), staircase(1, 10, 4, 10)), None, 40)))
    counts, _ = np.histogram(arrivals, bins=[0, 10e6, 20e6, 30e6, 40e6])
    assert counts.tolist() == [10, 40, 70, 100]
    assert np.diff(arrivals[arrivals >= 30_000_000]).tolist() == pytest.approx([100_000] * 99, abs=1)


def test_a_series_may_stop_and_go_on_and_end() -> None:
    arrivals = first(100, at_rate(evenly(), stepped([(1, 2), (2, 0), (3, 4), (4, 0)])))
    assert arrivals == [1_000_000, 1_500_000, 3_000_000, 3_250_000, 3_500_000, 3_750_000, 4_000_000]
    assert len(first(100, before(at_rate(evenly(), stepped([(0, 2), (1, 0)])), None, 99))) == 3


def test_a_series_of_lines() -> None:
    # A triangle of 10 high over 2 s expects 10: five on each side of its top.
    arrivals = np.array(first(100, before(at_rate(evenly(), profile([(0, 0), (1, 10), (2, 0)])), None, 2)))
    assert len(arrivals) == 10
    assert (arrivals < 1_000_000).sum() == 5


@given(
    st.lists(st.tuples(st.floats(0.01, 5), RATES), min_size=1, max_size=6).filter(lambda p: any(rate for _, rate in p)),
    st.booleans(),
)
def test_as_many_arrive_as_the_rate_expects(gaps: list[tuple[float, float]], lines: bool) -> None:
    points, at_s = [], 0.0
    for gap, rate in gaps:
        points.append((at_s, rate))
        at_s += gap
    rates = (profile if lines else stepped)(points)
    arrivals = np.array(first(2000, before(at_rate(evenly(), rates), None, at_s)))
    assert np.all(np.diff(arrivals) >= 0)
    # Evenly spaced in expected arrivals: never more than one off the integral of the rate, at any time.
    for until_s in np.linspace(0, at_s, 13):
        assert abs((arrivals < until_s * 1e6).sum() - min(2000, expected_by(rates, until_s))) <= 1.001


def expected_by(rates: RateProfile, until_s: float) -> float:
    """The rate's integral, in ten thousand small steps between the pieces' ends."""
    ends = sorted({*rates.starts_s.tolist(), until_s})
    total = 0.0
    for start, end in pairwise(ends):
        if end <= until_s:
            piece = int(np.searchsorted(rates.starts_s, start, side="right")) - 1
            slope, rate = rates.slopes[piece], rates.rates[piece]
            middle = rate + slope * ((start + end) / 2 - rates.starts_s[piece])
            total += middle * (end - start)
    return total


def test_a_changing_poisson_process_is_poisson_in_its_own_time() -> None:
    from scipy import stats

    rates = ramp(1, 100, 300)
    arrivals = np.array(first(5000, at_rate(exponentially(2), rates))) / 1e6
    # Its expected counts at the arrivals must be a unit Poisson process again.
    counts = arrivals * 1 + arrivals**2 * (99 / 300) / 2
    assert stats.kstest(np.diff([0, *counts]), stats.expon.cdf).pvalue > 0.001


def test_plans_without_an_end_are_not_made_ahead() -> None:
    assert first(3, at_rate(exponentially(0), flat(1e-3))) == sorted(first(3, at_rate(exponentially(0), flat(1e-3))))
    assert PARTS == 1_000_000
