"""Arrivals: known ones by hand, and what each process is by definition, at rates that stay and rates that change."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.arrivals import (
    Chunks,
    at_rate,
    before,
    evenly,
    exponentially,
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


@given(
    st.lists(st.tuples(st.floats(0.01, 5), RATES), min_size=1, max_size=6).filter(lambda p: any(rate for _, rate in p))
)
def test_arrivals_match_the_expected_count(gaps: list[tuple[float, float]]) -> None:
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


def test_poisson_process_with_changing_rate() -> None:
    from scipy import stats

    arrivals = np.array(first(5000, at_rate(exponentially(2), rate_profile([(0, 1), (100, 10), (200, 100)])))) / 1e6
    # Its expected counts at the arrivals must be a unit Poisson process again.
    counts = np.interp(arrivals, [0, 100, 200, 300], [0, 100, 1100, 11_100])
    assert stats.kstest(np.diff([0, *counts]), stats.expon.cdf).pvalue > 0.001
