"""The load benchmark's arithmetic: what it makes of a server's truth and a client's word."""

import pytest

from loadgen.selftest.truth import Served, Truth
from scripts.loadbench.cases import Case, cases
from scripts.loadbench.results import ROWS, Results
from scripts.loadbench.runs import Ran, figures_of
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
    truth = Truth([served(str(number), 10.0 * number) for number in range(101)], 250 * MS, 0, 1000 * MS)
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
    truth = Truth([served(str(number), 20.0 * number) for number in range(9)], 0, 0, 1)
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
