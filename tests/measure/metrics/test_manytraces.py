"""Metrics of many traces: counts are exact sums, quantiles within 0.1 % of all samples', the same in any order."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.metrics.manytraces import MetricsPart, merged_metrics, metrics_part
from measure.metrics.results import Goodput, HealthCheck, Statistics
from measure.metrics.sketches import Sketch, sketch_of
from measure.metrics.slos import parse_slos
from measure.metrics.statistics import statistics_of
from measure.metrics.trace import measure_run
from tests.measure.metrics.made import request, run_of
from tracefile import InputError, Record, SessionId


def conversation(name: str, begin_ms: float, ttfts_ms: Sequence[float], prompt: int) -> list[Record]:
    """Turns a second apart, each with two gaps of a tenth of its TTFT; a TTFT of 0 is a failed request."""
    return [
        request(
            f"{name}-{turn}",
            begin_ms + 1000.0 * turn,
            session_id=SessionId(name),
            turn=turn,
            ttft_ms=ttft_ms or None,
            itl_ms=[ttft_ms / 10] * 2 if ttft_ms else [],
            itl_tokens=[1, 1] if ttft_ms else [],
            e2e_ms=1.2 * ttft_ms or 5.0,
            status="ok" if ttft_ms else "error",
            prompt_tokens=prompt + 100 * turn,
            cached_tokens=prompt if turn > 1 else 0,
            output_tokens=3 if ttft_ms else None,
        )
        for turn, ttft_ms in enumerate(ttfts_ms, 1)
    ]


def part(name: str, records: Sequence[Record], *slos: str) -> MetricsPart:
    return metrics_part(name, run_of(records), None, parse_slos(slos))


def assert_close(found: dict[str, Statistics | None], exact: dict[str, Statistics | None]) -> None:
    assert list(found) == list(exact)
    for name, one in exact.items():
        mine = found[name]
        if one is None or mine is None:
            assert mine is one
            continue
        assert type(mine) is Statistics
        assert (mine.n, mine.min, mine.max) == (one.n, one.min, one.max)
        assert mine.mean == pytest.approx(one.mean, rel=1e-12)
        for level in ("p50", "p90", "p95", "p99"):
            assert getattr(mine, level) == pytest.approx(getattr(one, level), rel=1e-3)


TTFTS = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1e6)), min_size=1, max_size=4)
ENGINES = st.lists(st.lists(st.tuples(TTFTS, st.integers(1, 5000)), min_size=1, max_size=4), min_size=2, max_size=4)


@settings(max_examples=25)
@given(ENGINES, st.randoms(use_true_random=False))
def test_parts_have_the_metrics_of_the_whole(engines: list[list[tuple[list[float], int]]], draw: object) -> None:
    records = [
        [
            record
            for row, (ttfts, prompt) in enumerate(some)
            for record in conversation(f"{at}.{row}", 10.0 * row, ttfts, prompt)
        ]
        for at, some in enumerate(engines)
    ]
    parts = [part(f"{at}", some) for at, some in enumerate(records)]
    merged = merged_metrics(_sum(parts), (), None)
    assert merged == merged_metrics(_sum(parts[::-1]), (), None)
    whole = measure_run(run_of([record for some in records for record in some]))
    assert merged.requests == whole.requests
    assert (merged.sessions.n, merged.sessions.completed) == (whole.sessions.n, whole.sessions.completed)
    assert (merged.hits.reported, merged.hits.accounted) == (whole.hits.reported, whole.hits.accounted)
    for name in ("per_request", "per_session", "shape"):
        assert_close(getattr(merged, name), getattr(whole, name))
    assert_close(dict(merged.prefill.by_turn), dict(whole.prefill.by_turn))
    for name in ("by_prompt_tokens", "by_uncached_tokens"):
        mine, exact = getattr(merged.prefill, name), getattr(whole.prefill, name)
        assert [(one.from_tokens, one.to_tokens) for one in mine] == [(one.from_tokens, one.to_tokens) for one in exact]
        assert_close(
            {str(one.to_tokens): one.ttft_ms for one in mine}, {str(one.to_tokens): one.ttft_ms for one in exact}
        )


def _sum(parts: Sequence[MetricsPart]) -> MetricsPart:
    whole = parts[0]
    for one in parts[1:]:
        whole = whole.plus(one)
    return whole


FIRST = conversation("a", 0.0, [100.0, 20.0], 1000)  # ends at 2,024 ms
SECOND = conversation("b", 500.0, [300.0, 0.0, 40.0], 2000)  # ends at 3,548 ms: 2,048 after its first arrival


def test_rates_are_sums_and_the_wall_time_is_the_longest() -> None:
    merged = merged_metrics(_sum([part("x", FIRST), part("y", SECOND)]), (), None)
    assert merged.workload.wall_s == pytest.approx(2.048)
    assert merged.workload.requests_per_s == pytest.approx(2 / 1.024 + 2 / 2.048)
    assert merged.workload.completion_tps.overall == pytest.approx(6 / 1.024 + 6 / 2.048)
    assert (merged.workload.concurrency, merged.workload.timeline, merged.prefill.fit) == (None, None, None)
    assert merged.overview.success == 0.8
    order = next(one for one in merged.health if one.name == "arrival rate")
    assert order == HealthCheck(name="arrival rate", verdict="unknown", figure="2 of 2 traces; x: no plan", where="")


def test_slos_are_judged_on_all_samples() -> None:
    slos = ("ttft.p50<=50ms", "turns2+.ttft.max<=40ms", "success>=80%", "goodput>=50%")
    whole = _sum([part("x", FIRST, *slos), part("y", SECOND, *slos)])
    merged = merged_metrics(whole, parse_slos(slos), None)
    assert [(one.met, one.n) for one in merged.slos] == [(True, 4), (True, 2), (True, 5), (False, 5)]
    assert merged.slos[0].value == pytest.approx(40.0, rel=1e-3)
    assert merged.slos[1].value == 40.0
    good = merged.workload.goodput
    assert isinstance(good, Goodput)
    assert (good.requests, good.share) == (2, 0.4), "20 and 40 ms"
    with pytest.raises(InputError, match=r"--slo lag.p99<=1ms: no trace has its metric"):
        merged_metrics(_sum([part("x", FIRST, "lag.p99<=1ms")]), parse_slos(["lag.p99<=1ms"]), None)


def test_engines_of_two_block_sizes_have_no_cache_size_together() -> None:
    def hashed(block_size: int) -> MetricsPart:
        records = [request(name, at, prompt_tokens=65, block_hashes=[1, 2]) for at, name in enumerate("ab")]
        return metrics_part(f"{block_size}", run_of(records, block_size=block_size))

    alike = merged_metrics(_sum([hashed(32), replace(hashed(32), traces={"b": hashed(32).traces["32"]})]), (), None)
    assert alike.cache is not None
    assert (alike.cache.knee_blocks, alike.cache.unlimited_rate) == (2, 64 / 130)
    assert merged_metrics(_sum([hashed(16), hashed(32)]), (), None).cache is None


@given(st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=40))
def test_a_sketch_is_within_a_thousandth(values: list[float]) -> None:
    found, exact = sketch_of(np.array(values)), statistics_of(np.array(values))
    assert isinstance(found, Sketch)
    assert exact is not None
    for level in ("p50", "p90", "p95", "p99"):
        assert math.isclose(getattr(found, level), getattr(exact, level), rel_tol=1e-3)


@given(st.lists(st.integers(-1023, 1023), min_size=1, max_size=40))
def test_small_whole_numbers_are_exact(values: list[int]) -> None:
    found = sketch_of(np.array(values, np.float64))
    assert found is not None
    assert found.statistics() == statistics_of(np.array(values, np.float64))
