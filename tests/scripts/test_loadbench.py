"""The load benchmark's arithmetic: what it makes of a server's truth and a client's word."""

import numpy as np
import pytest

from scripts.loadbench.cases import Case, cases
from scripts.loadbench.results import ROWS, Results
from scripts.loadbench.runs import Ran, figures_of, lags_ms
from scripts.loadbench.server_log import Served, ServerLog, quantile, received_ns, steady_part, ttft_errors_ms
from scripts.loadbench.tree import TreeCost

MS = 1_000_000


def served(name: str, received_ms: float, ttft_ms: float | None = 5.0) -> Served:
    received_ns = round(received_ms * MS)
    first_ns = None if ttft_ms is None else received_ns + round(ttft_ms * MS)
    return Served(name, received_ns, received_ns, first_ns, first_ns, 16, 2)


def test_cpu_is_counted_over_the_steady_part() -> None:
    cost = TreeCost(at_ns=[0, 100, 200, 300, 400], cpu_ns=[0, 50, 150, 250, 400])
    # From 90 to 310: the samples at 100 and 300 are 200 ns of CPU in 200 ns.
    assert cost.cpu_between(90, 310) == pytest.approx(220e-9)
    assert cost.cpu_between(310, 320) is None


def test_figures_of_a_run_at_a_rate() -> None:
    truth = ServerLog([served(str(number), 10.0 * number) for number in range(101)], 250 * MS, 0, 1000 * MS)
    told = {str(number): 5.5 * MS for number in range(100)}
    case = Case(name="rate", output_tokens=16, rate=100.0, duration_s=1.0, server=())
    found = figures_of("x", case, Ran(truth, told, -500 * MS, TreeCost(), None))
    assert (found.requests, found.told, found.server_cpu) == (101, 100, 0.25)
    assert found.requests_per_s == pytest.approx(100.0, rel=0.02)
    assert found.events_per_s == 16 * found.requests_per_s
    assert (found.ttft_error_p50_ms, found.lag_p99_ms, found.first_request_s) == (0.5, 0.0, 0.5)
    assert found.cpu_us_per_request is None


def test_the_table_has_ratios_and_goals() -> None:
    (case,) = [case for case in cases(1.0) if case.name == "rate50"]
    told = {name: {str(n): (5 + error) * MS for n in range(9)} for name, error in (("kvtape", 0.125), ("other", 0.5))}
    truth = ServerLog([served(str(number), 20.0 * number) for number in range(9)], 0, 0, 1)
    runs = [figures_of(name, case, Ran(truth, told[name], 0, TreeCost(), None)) for name in told]
    lines = Results(runs).table(["kvtape", "other"], markdown=True).splitlines()
    assert lines[0] == "|  | kvtape | other | kvtape / other | goal | reached |"
    assert "| 50/s: TTFT error p50, ms | 0.12 | 0.50 | 0.25 | ≤ 0.2 | yes |" in lines
    assert {row.case for row in ROWS} == {case.name for case in cases(1.0)}


def test_a_goal_beside_another_client_is_judged_by_its_figure() -> None:
    goals = {(row.case, row.name): row.goal for row in ROWS}
    requests = goals["short", "16-token streams, requests/s"]
    assert requests is not None
    assert str(requests) == "≥ 1.3 × aiohttp"
    assert requests.reached({"kvtape": 131.0, "aiohttp": 100.0}) is True
    assert requests.reached({"kvtape": 129.0, "aiohttp": 100.0}) is False
    assert requests.reached({"kvtape": 131.0}) is None
    assert str(goals["long", "256-token streams, events/s"]) == "≥ 1.5 × aiohttp"
    assert str(goals["rate200", "– TTFT error p99, ms"]) == "≤ 1.5 × bare loop"


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


def test_a_quantile_is_a_value_that_occurred() -> None:
    assert [quantile(np.array([4.0, 1.0, 2.0, 3.0]), level) for level in (0.5, 0.75, 0.99)] == [2.0, 3.0, 4.0]


def test_nothing_has_no_quantile() -> None:
    assert quantile(lags_ms(received_ns([]), 10.0), 0.5) is None
