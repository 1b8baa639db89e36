"""Throughput in windows and requests in flight, by hand."""

from typing import Any

import numpy as np
import pytest

from measure.metrics.results import Rates
from measure.metrics.workload import measure_workload
from tests.measure.metrics.made import request, run_of
from tracefile.records.schema import Engine, Record, Workload


def tokens(name: str, span_s: tuple[float, float], counts: tuple[int, int, int], **hashed: Any) -> Record:
    """A request from arrival to end, with prompt, cached and output tokens."""
    begin_s, end_s = span_s
    named = dict(zip(("prompt_tokens", "cached_tokens", "output_tokens"), counts, strict=True))
    return request(name, begin_s * 1000, e2e_ms=(end_s - begin_s) * 1000, **named, **hashed)


# 100 s of wall time from the first arrival at 10 s: ends at 10, 20, 80 and 100 s after it.
RUN = run_of(
    [
        tokens("a", (10, 20), (1000, 0, 100)),
        tokens("b", (10, 30), (1000, 500, 100)),
        tokens("c", (30, 90), (3000, 2000, 300)),
        tokens("d", (90, 110), (2000, 1000, 200)),
        tokens("e", (90, 100), (9999, 0, 999), status="error"),
    ],
    engine=Engine(gpus=4),
    workload=Workload(extra={"parallel": 2, "rate": 0.5}),
)


def test_windows_are_slopes_of_the_cumulative_curve() -> None:
    result = measure_workload(RUN, 4)
    assert result.wall_s == 100.0
    # Overall: all tokens / 100 s. Last 30 s: of c (at 80 s) and d. Steady: what ended after 20 s / 80 s.
    assert result.prompt_tps == Rates(overall=70.0, last_30s=5000 / 30, steady=62.5, steady_per_gpu=15.625)
    assert result.cached_tps == Rates(overall=35.0, last_30s=100.0, steady=37.5, steady_per_gpu=9.375)
    assert result.uncached_tps == Rates(overall=35.0, last_30s=2000 / 30, steady=25.0, steady_per_gpu=6.25)
    assert result.completion_tps == Rates(overall=7.0, last_30s=500 / 30, steady=6.25, steady_per_gpu=1.5625)
    assert result.requests_per_s == 0.04


def test_requests_in_flight_by_time() -> None:
    result = measure_workload(RUN, None)
    assert result.concurrency is not None
    # 2 in flight for 10 s, 1 for 10 s, 1 for 60 s, 2 for 10 s, 1 for 10 s: 120 request-seconds in 100 s.
    assert result.concurrency.mean == 1.2
    assert (result.concurrency.p50, result.concurrency.p90, result.concurrency.max) == (1, 2, 2)
    assert result.timeline is not None
    assert sum(result.timeline.in_flight) / len(result.timeline.in_flight) == pytest.approx(1.2, abs=1e-3)
    assert sum(result.timeline.completion_tps) * result.timeline.interval_s == pytest.approx(700, rel=1e-3)
    parts = (result.timeline.cached_tps, result.timeline.uncached_tps, result.timeline.prompt_tps)
    assert [sum(part) > 0 for part in parts] == [True, True, True]
    assert np.add(*parts[:2]) == pytest.approx(parts[2], abs=2e-3)
