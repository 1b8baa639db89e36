"""What a server's truth and a client's word make together."""

import numpy as np
import pytest

from loadgen.selftest.truth import Served, quantile, received_ns, steady_part, steady_rate, ttft_errors_ms
from scripts.loadbench.runs import lags_ms

MS = 1_000_000


def served(name: str, received_ms: float, ttft_ms: float | None = 5.0) -> Served:
    received_ns = round(received_ms * MS)
    first_ns = None if ttft_ms is None else received_ns + round(ttft_ms * MS)
    return Served(name, received_ns, received_ns, first_ns, first_ns, 16, 2)


def test_the_error_is_what_the_client_says_beyond_the_truth() -> None:
    truth = [served("a", 0), served("b", 10), served("cut", 20, None), served("untold", 30)]
    told = {"a": 5.25 * MS, "b": 7.0 * MS, "cut": 1.0 * MS, "of another run": 3.0 * MS}
    assert ttft_errors_ms(truth, told).tolist() == [0.25, 2.0]


def test_lag_is_measured_from_the_earliest_arrival() -> None:
    # 100 a second: due at 0, 10, 20, 30 from a start that nobody knows; the second came at its time at the earliest.
    received_ns = np.array([1003, 1011, 1025, 1031]) * MS
    assert lags_ms(received_ns, 100.0).tolist() == [2.0, 0.0, 4.0, 0.0]


def test_a_run_counts_between_its_start_and_its_end() -> None:
    assert steady_part(np.array([0, 100, 1000])) == (200, 950)
    assert steady_part(np.array([], dtype=np.int64)) == (0, 0)
    assert steady_rate(received_ns([served(str(n), 10.0 * n) for n in range(1001)])) == pytest.approx(100.0, rel=0.001)
    assert steady_rate(received_ns([served("one", 5.0)])) == 0.0


def test_a_quantile_is_a_value_that_occurred() -> None:
    assert [quantile(np.array([4.0, 1.0, 2.0, 3.0]), level) for level in (0.5, 0.75, 0.99)] == [2.0, 3.0, 4.0]


def test_nothing_has_no_quantile() -> None:
    assert quantile(lags_ms(received_ns([]), 10.0), 0.5) is None
