"""The line through TTFT by uncached tokens: known slopes, outliers, idle requests, and a slow oracle."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.metrics.prefillfit import FEWEST_IDLE, fit_prefill, sent_idle
from measure.metrics.tables import prefill_sentences
from measure.runs import Run
from tests.measure.metrics.made import request, run_of
from tracefile import Record


def prefills(points: list[tuple[int, float]], **more: int) -> list[Record]:
    """Requests far apart, so that each finds the engine idle."""
    return [
        request(f"r{at}", at * 1e5, ttft_ms=ms, e2e_ms=ms + 1.0, prompt_tokens=1000 + u, cached_tokens=1000, **more)
        for at, (u, ms) in enumerate(points)
    ]


def test_a_line_is_found_despite_slow_requests() -> None:
    # 20 ms and 0.05 ms a token; four of forty requests waited 3 s for something else.
    points = [(100 * at, 20.0 + 5.0 * at + (3000.0 if at % 10 == 3 else 0.0)) for at in range(1, 41)]
    fit = fit_prefill(run_of(prefills(points)))
    assert fit is not None
    assert (fit.n, fit.idle, fit.idle_requests) == (40, True, 40)
    assert fit.ms_per_1000_tokens == pytest.approx(50.0)
    assert fit.intercept_ms == pytest.approx(20.0)
    assert fit.tokens_per_s == pytest.approx(20_000.0)
    assert fit.low is not None
    assert fit.high is not None
    assert fit.low <= 50.0001
    assert fit.high >= 49.9999


def test_requests_that_waited_for_others_are_left_out_if_enough_did_not() -> None:
    alone = prefills([(100 * at, 10.0 * at) for at in range(1, FEWEST_IDLE + 1)], concurrency=1)
    queued = prefills([(100 * at, 5000.0) for at in range(1, 41)], concurrency=9)
    fit = fit_prefill(run_of([*queued, *alone]))
    assert fit is not None
    assert (fit.n, fit.idle) == (FEWEST_IDLE, True)
    assert fit.ms_per_1000_tokens == pytest.approx(100.0)
    too_few = fit_prefill(run_of([*queued, *alone[1:]]))
    assert too_few is not None
    assert (too_few.n, too_few.idle, too_few.idle_requests) == (59, False, FEWEST_IDLE - 1)


def test_no_line_without_two_lengths() -> None:
    assert fit_prefill(run_of(prefills([(100, 5.0), (100, 6.0)]))) is None
    assert fit_prefill(run_of([request("a", 0.0, ttft_ms=1.0, prompt_tokens=9)])) is None  # cached is not known
    level = fit_prefill(run_of(prefills([(100, 5.0), (200, 5.0)])))
    assert level is not None
    assert (level.ms_per_1000_tokens, level.tokens_per_s, level.low) == (0.0, None, None)


def test_a_line_that_falls_has_no_price() -> None:
    said = list(prefill_sentences(fit_prefill(run_of(prefills([(100, 9.0), (200, 5.0)])))))
    assert said[0] == "prefill: TTFT does not grow with uncached tokens: something else than prefill decides it"
    assert said[1].startswith("prefill of 2 requests")


def test_idle_is_told_by_times_where_the_writer_did_not_count() -> None:
    records = [request(name, at, e2e_ms=length) for name, at, length in (("a", 0.0, 10.0), ("b", 5.0, 9.0))]
    run = run_of([*records, request("c", 14.0, e2e_ms=1.0), request("d", 20.0, e2e_ms=1.0, concurrency=3)])
    assert sent_idle(run).tolist() == [True, False, True, False]


points = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 200).map(float)), min_size=2, max_size=12)


@settings(max_examples=40, deadline=None)
@given(points)
def test_the_slope_is_the_weighted_median_of_all_pairs(found: list[tuple[int, float]]) -> None:
    run: Run = run_of(prefills(found))
    fit = fit_prefill(run)
    slopes = sorted(
        (np.float64(there - here) / (far - near), abs(far - near))
        for at, (near, here) in enumerate(found)
        for far, there in found[at + 1 :]
        if far != near
    )
    if not slopes:
        assert fit is None
        return
    upto = list(accumulate(weight for _, weight in slopes))
    slope = next(slope for (slope, _), sum_ in zip(slopes, upto, strict=True) if sum_ >= upto[-1] / 2)
    assert fit is not None
    assert fit.ms_per_1000_tokens == pytest.approx(1000.0 * slope)


def test_idle_requests_of_one_length_tell_no_slope_and_all_are_fitted() -> None:
    alone = prefills([(500, 50.0)] * FEWEST_IDLE, concurrency=1)
    queued = prefills([(500 + at, 50.0 + at) for at in range(1, 11)], concurrency=2)
    fit = fit_prefill(run_of([*alone, *queued]))
    assert fit is not None
    assert (fit.n, fit.idle, fit.idle_requests) == (FEWEST_IDLE + 10, False, FEWEST_IDLE)
    assert fit.ms_per_1000_tokens == pytest.approx(1000.0)
    # A token more makes two lengths.
    two = fit_prefill(run_of([*alone[1:], *prefills([(501, 51.0)], concurrency=1), *queued]))
    assert two is not None
    assert (two.n, two.idle) == (FEWEST_IDLE, True)
