"""The load benchmark's arithmetic: what it makes of a server's truth and a client's word."""

import pytest

from scripts.bench_loadgen import ROWS, table
from scripts.figures import Figure, figure_table
from scripts.loadbench.runs import Case, cases, figures_of
from scripts.reference_server import Pace, Served, ServerLog

MS = 1_000_000


def served(name: str, received_ms: float, ttft_ms: float | None = 5.0) -> Served:
    received_ns = round(received_ms * MS)
    written_ns = [] if ttft_ms is None else [received_ns + round(ttft_ms * MS)] * 2
    return Served(name, received_ns, received_ns, 16, 2, written_ns)


def test_figures_of_a_run_at_a_rate() -> None:
    truth = ServerLog([served(str(number), 10.0 * number) for number in range(101)], 250 * MS, 0, 1000 * MS)
    ttfts = {str(number): 5.5 * MS for number in range(100)}
    case = Case(name="rate", output_tokens=16, rate=100.0, duration_s=1.0, server=Pace())
    figures = figures_of("x", case, truth, ttfts, launched_ns=-500 * MS, cpu_s=0.0101)
    assert (figures.requests, figures.server_cpu) == (101, 0.25)
    assert figures.requests_per_s == pytest.approx(100.0, rel=0.02)
    assert figures.events_per_s == 16 * figures.requests_per_s
    assert (figures.ttft_error_p50_ms, figures.lag_p99_ms, figures.first_request_s) == (0.5, 0.0, 0.5)
    assert figures.cpu_us_per_request == pytest.approx(100.0)


def test_the_table_has_ratios_and_goals() -> None:
    (case,) = [case for case in cases(1.0) if case.name == "rate50"]
    ttfts = {name: {str(n): (5 + error) * MS for n in range(9)} for name, error in (("kvtape", 0.125), ("other", 0.5))}
    truth = ServerLog([served(str(number), 20.0 * number) for number in range(9)], 0, 0, 1)
    runs = [figures_of(name, case, truth, ttfts[name], launched_ns=0, cpu_s=0.0) for name in ttfts]
    lines = table(runs).splitlines()
    assert lines[0] == "|  | kvtape | other | kvtape / other | goal | reached |"
    assert "| 50/s: TTFT error p50, ms | 0.12 | 0.50 | 0.25 | ≤ 0.2 | yes |" in lines
    assert {row[0] for row in ROWS} == {case.name for case in cases(1.0)}


def test_goal_relative_to_the_bare_loop() -> None:
    (case,) = [case for case in cases(1.0) if case.name == "rate200"]
    truth = ServerLog([served(str(number), 20.0 * number) for number in range(9)], 0, 0, 1)
    for ours, reached in ((0.5, "yes"), (1.0, "NO")):
        ttfts = {"kvtape": ours, "bare loop": 0.5}
        runs = [
            figures_of(name, case, truth, {str(n): (5 + error) * MS for n in range(9)}, launched_ns=0, cpu_s=0.0)
            for name, error in ttfts.items()
        ]
        assert (
            f"| – TTFT error p99, ms | {ours:.2f} | 0.50 | {ours / 0.5:.2f} | ≤ bare loop × 1.5 | {reached} |"
            in table(runs)
        )


def test_goal_relative_to_a_peer() -> None:
    figures = [Figure("p99", "added p99", ",.0f", "≤ nginx + 150"), Figure("rss", "RSS", ",.1f", "≤ 80")]
    rounds = {"nginx": {"p99": [100.0, 300.0, 200.0]}, "tap": {"p99": [350.0, 340.0, 351.0], "rss": [80.0]}}
    assert figure_table(figures, rounds, "tap", ["nginx"]).splitlines()[2:] == [
        "| added p99 | 200 | 350 | 1.75 | ≤ nginx + 150 | yes |",
        "| RSS |  | 80.0 |  | ≤ 80 | yes |",
    ]
    # Without the peer, nobody can say.
    assert figure_table(figures[:1], {"tap": rounds["tap"]}, "tap", ["nginx"]).splitlines()[2] == (
        "| added p99 | 350 | ≤ nginx + 150 | ? |"
    )
