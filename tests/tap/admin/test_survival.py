"""TTFT survival from counts: report's curves are the oracle, at the buckets' bounds, where both must agree."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.survival import CENSORED, EVENT, FAILED, incidence, make_waits
from tap.admin.survival import BOUNDS_MS, SurvivalCurves, cohorts_of, count_wait, no_waits, survival, wait_of
from tap.ipc.feed import SeenRecord
from tracefile.records.arrays import IntArray
from tracefile.records.schema import Status


def seen(
    status: Status = "ok",
    *,
    ttft_ms: float | None = None,
    e2e_ms: float | None = 100.0,
    stream: bool = True,
    turn: int | None = None,
    prompt: int | None = None,
    cached: int | None = None,
) -> SeenRecord:
    return SeenRecord(status, stream, turn, ttft_ms, e2e_ms, prompt, cached, None)


def waits_of(*ends: tuple[int, int]) -> IntArray:
    counts = no_waits()
    for bucket, end in ends:
        count_wait(counts, BOUNDS_MS[bucket], end)
    return counts


def test_an_aborted_wait_is_censored_and_an_error_competes() -> None:
    """Four waits: a token, an abort, an error, a token. 3/4 wait after the first; of the 2 left after the abort one
    fails, which takes half of the 3/4 for good; the last token takes the other half."""
    curve = survival(waits_of((10, EVENT), (20, CENSORED), (30, FAILED), (40, EVENT)))
    assert (curve.n, curve.censored, curve.failed) == (4, 1, 1)
    assert curve.times_ms == [BOUNDS_MS[10], BOUNDS_MS[40]]
    assert curve.waiting == pytest.approx([0.75, 0.375])
    assert curve.quantiles_ms == [BOUNDS_MS[40], None, None]  # 62.5 % ever get a token: no p90, and none is invented
    assert curve.known_until_ms == BOUNDS_MS[40]


def test_the_band_is_greenwoods_where_nothing_competes() -> None:
    """After 5 of 10: variance ½·½/10 on the share, ±1.96 of it over ½·½ on the log-odds."""
    curve = survival(waits_of(*[(10, EVENT)] * 5, *[(20, EVENT)] * 5))
    spread = 1.959964 * math.sqrt(0.25 / 10) / 0.25
    assert curve.low[0] == pytest.approx(1 / (1 + math.exp(spread)))
    assert curve.high[0] == pytest.approx(1 / (1 + math.exp(-spread)))
    assert (curve.low[1], curve.waiting[1], curve.high[1]) == (0.0, 0.0, 0.0)


def test_no_wait_is_an_empty_curve_and_censored_ones_alone_never_fall() -> None:
    assert SurvivalCurves().recent(0.0) == {}
    only_aborts = survival(waits_of((50, CENSORED), (60, CENSORED)))
    assert (only_aborts.times_ms, only_aborts.quantiles_ms) == ([], [None, None, None])
    assert only_aborts.known_until_ms == BOUNDS_MS[60]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from((EVENT, FAILED, CENSORED))), min_size=1, max_size=40))
def test_the_curve_is_reports_curve(ends: list[tuple[int, int]]) -> None:
    # Ends of a bucket come before its censorings here; report orders failures after tokens at equal times.
    curve = survival(waits_of(*((2 * bucket + (end == FAILED), end) for bucket, end in ends)))
    times = np.array([BOUNDS_MS[2 * bucket + (end == FAILED)] for bucket, end in ends])
    kinds = np.array([end for _, end in ends], dtype=np.int8)
    known = make_waits(times, kinds, np.arange(len(ends)))
    share = incidence(known)
    for time_ms, waiting in zip(curve.times_ms, curve.waiting, strict=True):
        last = int(np.searchsorted(known.time_ms, time_ms, side="right")) - 1
        assert waiting == pytest.approx(1 - share[last], abs=1e-9)
    assert all(low <= at <= high for low, at, high in zip(curve.low, curve.waiting, curve.high, strict=True))


def test_what_a_request_waited_for() -> None:
    assert wait_of(seen(ttft_ms=12.0)) == (12.0, EVENT)
    assert wait_of(seen("client_abort", ttft_ms=12.0)) == (12.0, EVENT)  # it came, whatever was then
    assert wait_of(seen("client_abort")) == (100.0, CENSORED)
    assert wait_of(seen("timeout")) == (100.0, CENSORED)
    assert wait_of(seen("error")) == (100.0, FAILED)
    assert wait_of(seen("upstream_abort")) == (100.0, FAILED)
    assert wait_of(seen()) is None  # ended well without a token
    assert wait_of(seen("client_abort", stream=False)) is None  # no first token was ever to be seen


def test_cohorts_and_what_is_forgotten() -> None:
    assert cohorts_of(seen()) == ["all"]
    assert cohorts_of(seen(turn=1, prompt=300, cached=0)) == ["all", "turn1", "uncached:256-1023"]
    assert cohorts_of(seen(turn=4, prompt=300, cached=288)) == ["all", "turns2+", "uncached:0-255"]
    assert cohorts_of(seen(prompt=90_000, cached=0)) == ["all", "uncached:16384+"]
    curves = SurvivalCurves()
    curves.take(seen(ttft_ms=10.0, turn=1), 0.0)
    curves.take(seen(ttft_ms=10.0, turn=2), 14 * 60.0)
    assert {name: curve.n for name, curve in curves.recent(14 * 60.0).items()} == {"all": 2, "turn1": 1, "turns2+": 1}
    assert {name: curve.n for name, curve in curves.recent(15 * 60.0).items()} == {"all": 1, "turns2+": 1}
