"""The page of a sweep: figures of literal points, one for each of several workloads, and drawn by a real browser."""

from pathlib import Path

import plotly.graph_objects as go
import pytest

from report.__main__ import main
from report.sweeps.inputs import plan_runs
from report.sweeps.measuring import Question, measure_sweep
from report.sweeps.page import draw_sweep, render_sweep
from report.sweeps.results import Sweep
from tests.report.browser import CHROMIUM, figures_drawn, page_figures
from tests.report.sweeps.conftest import A, B, MakeSweep, Pace

SLO = ["--slo", "ttft.p90<=500ms"]


def measured(*folders: Path) -> Sweep:
    return measure_sweep(plan_runs([str(folder) for folder in folders], []), [], Question(draws=20))


def test_points_stand_at_their_throughput(make_sweep: MakeSweep) -> None:
    crowded = {**A, 32: [Pace(ttft_ms=2000.0, gap_ms=200.0)]}
    figures = draw_sweep(measured(make_sweep({"A": crowded, "B": B}))).figures
    assert set(figures) == {f"{name}-loads" for name in ("interactivity", "latency", "hits", "ttft")}
    assert all(len(go.Figure(figure).data) == len(figure["data"]) for figure in figures.values())
    traces = [
        (trace["name"], trace["mode"], trace["x"], trace["y"], trace.get("text"))
        for trace in figures["interactivity-loads"]["data"]
    ]
    assert traces == [
        ("A", "lines", [25.0, 50.0], [352.0, 293.33], None),
        ("A", "markers+text", [25.0, 50.0], [352.0, 293.33], ["16", "8"]),
        ("A, dominated", "markers+text", [5.0], [88.0], ["32"]),
        ("B", "lines", [40.0, 100.0], [502.86, 440.0], None),
        ("B", "markers+text", [40.0, 100.0], [502.86, 440.0], ["16", "8"]),
    ]
    latency = figures["latency-loads"]["data"]
    assert [trace["x"] for trace in latency if trace["mode"] == "lines"] == [[0.6, 1.0], [0.4, 0.7]]
    hits = {trace["name"]: trace["y"] for trace in figures["hits-loads"]["data"]}
    assert hits["A, eligible"] == [1.0, 0.5, 1.0]


def test_several_workloads_have_a_row_for_each_load(make_sweep: MakeSweep) -> None:
    names = {name: make_sweep({f"{name}/A": A, f"{name}/B": B}, name) for name in ("chat", "code")}
    found = measured(*names.values())
    figures = page_figures(render_sweep(found, draw_sweep(found)))
    rows = figures["all"]["layout"]["yaxis"]["ticktext"]
    assert rows == [f"{name}, concurrency {load}" for name in names for load in (8, 16)]
    assert figures["all"]["data"][1]["x"] == [1.0] * 4
    assert {f"hits-{name}" for name in names} <= set(figures)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_draws_the_page(make_sweep: MakeSweep, tmp_path: Path) -> None:
    page, folder = tmp_path / "sweep.html", make_sweep({"A": A, "<b>B & C": B, "D": {8: ["failed"]}})
    assert main(["sweep", str(folder), "--html", str(page), *SLO, "--bootstrap", "20"]) == 0
    assert "Left out: D-8-r1: failed (killed)." in page.read_text()
    names = ("interactivity", "latency", "hits", "ttft", "goodput")
    assert figures_drawn(page) == {f"{name}-loads" for name in names}
