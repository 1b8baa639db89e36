"""Metrics of single requests, each by hand on a trace of three."""

import numpy as np
import pytest

from measure.metrics.requests import REQUEST_METRICS, request_counts
from measure.metrics.statistics import statistics_of
from tests.measure.metrics.made import request, run_of

RUN = run_of(
    [
        # Due at 90, sent at 100: three reads of 2, 1 and 3 tokens, then an end that carries none.
        request(
            "a",
            100.0,
            scheduled_ms=90.0,
            ttft_ms=50.0,
            itl_ms=[10.0, 30.0],
            itl_tokens=[1, 3],
            e2e_ms=96.0,
            prompt_tokens=1000,
            cached_tokens=512,
            output_tokens=6,
            turn=1,
        ),
        # One read carried all: no gap, no pace.
        request("b", 200.0, ttft_ms=20.0, e2e_ms=20.0, prompt_tokens=10, cached_tokens=0, output_tokens=4, turn=2),
        # Gave up after its first token.
        request("c", 300.0, ttft_ms=40.0, itl_ms=[8.0], e2e_ms=70.0, status="client_abort", output_tokens=2),
    ]
)
NAN = float("nan")
BY_HAND = {
    "ttft_ms": [50.0, 20.0, 40.0],
    "ttft_from_schedule_ms": [60.0, NAN, NAN],  # 100 + 50 − 90
    "itl_ms": [10.0, 10.0, 8.0],  # 10 / 1, 30 / 3, 8 / 1
    "tpot_ms": [10.0, NAN, 8.0],  # (10 + 30) / (1 + 3)
    "e2e_ms": [96.0, 20.0, NAN],  # of completed requests
    "e2e_per_token_ms": [16.0, 5.0, NAN],  # 96 / 6, 20 / 4
    "interactivity_tps": [100.0, NAN, 125.0],  # 1000 / 10, 1000 / 8
    "input_tokens": [1000.0, 10.0, NAN],
    "output_tokens": [6.0, 4.0, 2.0],
    "turns": [1.0, 2.0, NAN],
}


@pytest.mark.parametrize("name", REQUEST_METRICS)
def test_each_metric_by_hand(name: str) -> None:
    np.testing.assert_allclose(REQUEST_METRICS[name](RUN), BY_HAND[name])


def test_quantiles_are_order_statistics() -> None:
    result = statistics_of(np.array([5.0, NAN, 1.0, 2.0, 4.0, 3.0]))
    assert result is not None
    assert (result.n, result.mean, result.min, result.max) == (5, 3.0, 1.0, 5.0)
    assert (result.p50, result.p90, result.p95, result.p99) == (3.0, 5.0, 5.0, 5.0)  # the 3rd, 5th, 5th and 5th of 5
    assert statistics_of(np.array([NAN])) is None


def test_requests_cancelled_at_the_end_of_the_run_are_no_failures() -> None:
    aborted = {"status": "client_abort", "e2e_ms": 5.0}
    records = [
        request("a", 0.0, e2e_ms=9.0),
        request("b", 1.0, error="deadline", **aborted),
        request("c", 2.0, **aborted),
    ]
    counts = request_counts(run_of(records))
    assert (counts.n, counts.completed, counts.cancelled, counts.success) == (3, 1, 1, 0.5)


def test_a_read_without_a_token_count_has_one_token() -> None:
    """Other tools' traces: fewer counts than gaps, and more."""
    run = run_of(
        [
            request("few", 0.0, ttft_ms=1.0, itl_ms=[1.0, 2.0, 3.0], itl_tokens=[4]),
            request("all", 9.0, ttft_ms=1.0, itl_ms=[5.0, 6.0], itl_tokens=[2, 3]),
            request("many", 19.0, ttft_ms=1.0, itl_ms=[7.0], itl_tokens=[5, 6, 7]),
        ]
    )
    assert run.gap_ms.tolist() == [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    assert run.gap_tokens.tolist() == [4, 1, 1, 2, 3, 5]
    assert run.gap_owner.tolist() == [0, 0, 0, 1, 1, 2]
