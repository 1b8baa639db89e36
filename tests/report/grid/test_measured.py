"""``report show`` of sweeps: literal points, repeats, labels beside the first, what is left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from report.__main__ import main
from report.grid.measured import ratio_of
from report.grid.points import XY, pareto_set
from tests.jsonoutput import json_of
from tests.report.browser import CHROMIUM, figures_drawn
from tests.report.grid.conftest import A, B, MakeSweep, Pace
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine

CAPTURES = Path(__file__).parents[3] / "data" / "captures"


def sweep_of(*arguments: object) -> Any:
    return json_of(main, ["show", *map(str, arguments)])


def middles(point: dict[str, Any], of: str = "value") -> dict[str, float]:
    return {name: item[of]["middle"] for name, item in point["measures"].items() if item[of] is not None}


def test_points_have_the_metrics_of_their_runs(make_sweep: MakeSweep) -> None:
    result = sweep_of(make_sweep({"A": A, "B": B}), "--gpus", 2)
    assert result["axes"] == ["label", "concurrency"]
    first, second, *rest = result["points"]
    assert [point["name"] for point in result["points"]] == [
        f"{label} at concurrency {load}" for label in "AB" for load in (8, 16)
    ]
    assert middles(first) == pytest.approx(
        {
            "requests_per_s": 80 / 3.0,
            "completed": 1.0,
            "in_flight": 8.0,
            "ttft.all.p50": 100.0,
            "ttft.all.p90": 100.0,
            "tpot.p50": 20.0,
            "interactivity": 50.0,
            "session_latency.p90": 600.0,
            "hit_rate": 96 / 208,
            "output_tokens_per_s": 880 / 3.0,
            "output_tokens_per_s_per_gpu": 440 / 3.0,
        }
    )
    assert middles(first, "ratio") == middles(second, "ratio") == {}
    assert middles(rest[0], "ratio") == pytest.approx(
        {"output_tokens_per_s": 1.5, "ttft.all.p50": 1.0, "ttft.all.p90": 1.0, "interactivity": 2.0}
    )


def test_dominated_point_is_not_in_the_pareto_set(make_sweep: MakeSweep) -> None:
    slow, fast = {8: [Pace(ttft_ms=50.0)], 32: [Pace(ttft_ms=2000.0, gap_ms=200.0)]}, {8: [Pace(gap_ms=10.0)]}
    points = sweep_of(make_sweep({"A": slow, "B": fast}))["points"]
    assert [point["marks"] for point in points] == [["pareto"], [], ["pareto"]]


COORDINATES = st.integers(0, 6).map(float) | st.floats(-1e6, 1e6)


@settings(max_examples=60)
@given(st.lists(st.tuples(COORDINATES, COORDINATES), max_size=12))
def test_pareto_set_equals_its_definition(points: list[XY]) -> None:
    """No other point is at least as large in both coordinates and larger in one."""
    assert pareto_set(points) == [
        not any(x >= item[0] and y >= item[1] and (x > item[0] or y > item[1]) for x, y in points) for item in points
    ]


def test_repeats_have_the_t_interval_of_their_ratios(make_sweep: MakeSweep) -> None:
    result = ratio_of([12.0, 30.0], [10.0, 20.0])  # √1.8 times e^±(6.3138 · ln 1.25 / 2)
    assert result is not None
    assert (result.middle, result.low, result.high) == pytest.approx((1.2, 0.66326, 2.71385), rel=1e-4)
    alone = ratio_of([12.0, 15.0], [6.0])
    assert alone is not None
    assert (alone.middle, alone.low) == (2.0, None)
    assert ratio_of([1.0], [0.0]) is ratio_of([], [1.0]) is None
    slower = [Pace(gap_ms=20.0), Pace(gap_ms=30.0), Pace(gap_ms=25.0)]
    first, second = sweep_of(make_sweep({"A": {8: slower}, "B": {8: [Pace(gap_ms=10.0)] * 3}}))["points"]
    value = first["measures"]["interactivity"]["value"]
    assert (value["middle"], value["low"], value["high"]) == pytest.approx((40.0, 100 / 3, 50.0))
    ratio = second["measures"]["interactivity"]["ratio"]
    assert ratio["middle"] == 2.5
    assert ratio["low"] < 2.5 < ratio["high"]


def printed(capsys: pytest.CaptureFixture[str], arguments: Sequence[object], code: int = 0) -> list[str]:
    assert main(["show", *map(str, arguments)]) == code
    return capsys.readouterr().out.splitlines()


def test_sentences_name_throughput_latency_and_the_largest_load(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep({"A": A, "B": B, "C": {8: ["failed"]}})
    lines = printed(capsys, [folder, "--slo", "tpot.p90<=30ms"])
    assert lines[:4] == [
        "At concurrency 16 B gives 1.43 × A's output tokens per second, and its TTFT p90 is 1 × A's: 100 ms",
        "  against 100 ms",
        "tpot.p90<=30ms: met with A up to concurrency 8",
        "tpot.p90<=30ms: met with B at every load",
    ]
    assert "note: left out: C-8-r1: failed (killed)" in lines
    row = next(at for at, line in enumerate(lines) if line.startswith("B "))
    assert lines[row].split()[:6] == ["B", "8", "–", "met", "440", "100"]
    assert lines[row + 1].split()[0] == "+50"
    assert printed(capsys, [make_sweep({"A": A}, "alone")])[0] == (
        "A gives at most 352 output tokens per second, at concurrency 16"
    )


def test_label_without_a_passing_load_is_exit_code_1(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep({"A": A, "B": B})
    lines = printed(capsys, [folder, "--slo", "A.tpot.p90<=15ms"], 1)
    assert "A.tpot.p90<=15ms: met with A at no load" in lines
    printed(capsys, [folder, "--slo", "B.tpot.p90<=15ms", "--slo", "tpot.p90<=30ms"])


def test_several_engines_and_workloads_are_separate(make_sweep: MakeSweep) -> None:
    other = Pace(meta={"engine": Engine(name="vllm", version="0.33.0")})
    result = sweep_of(make_sweep({"A": {8: [Pace(), other]}}))
    assert result["notes"] == ["A: runs of several engines, vllm 0.32.0 and vllm 0.33.0: a label is one configuration"]
    chat = {f"chat/{label}": loads for label, loads in (("A", A), ("B", B))}
    code = {f"code/{label}": {8.0: [Pace(prompt_tokens=960)]} for label in "AB"}
    folders = [make_sweep(chat, "chat"), make_sweep(code, "code", of="rate")]
    result = sweep_of(*folders)  # limits beside rates: the points differ by requests in flight
    assert result["axes"] == ["label", "in flight"]
    assert {point["name"].partition("/")[0] for point in result["points"] if point["marks"]} == {"chat", "code"}


def test_bad_input_is_one_line(make_sweep: MakeSweep, tmp_path: Path) -> None:
    folder = make_sweep({"A": {8: [Pace(fails=True)], 16: ["cut"]}})
    good = make_sweep({"A": A}, "good")
    for arguments, text in (
        ([folder], "no run is done; expected at least one"),
        ([good, "--slo", "lag.p99<=5ms"], "A-8-r1.jsonl has no lag"),
        ([good, "--slo", "C.ttft.p90<=5ms"], "no compared label 'C'; expected one of A"),
        ([good, "--gpus", "0"], "--gpus: 0; expected 1 or more"),
        ([good, good / "A-8-r1.jsonl"], "a second trace; expected one, folders with sweep.jsonl, or report compare"),
    ):
        with pytest.raises(InputError) as error:
            main(["show", *map(str, arguments)])
        assert text in str(error.value)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_draws_the_page(make_sweep: MakeSweep, tmp_path: Path) -> None:
    page, folder = tmp_path / "sweep.html", make_sweep({"A": A, "<b>B & C": B, "D": {8: ["failed"]}})
    assert main(["show", str(folder), "--html", str(page), "--slo", "ttft.p90<=500ms"]) == 0
    assert "Left out: D-8-r1: failed (killed)." in page.read_text()
    assert "<b>B" not in page.read_text()
    assert figures_drawn(page) == {
        "frontier",
        "concurrency-ttft-all-p90",
        "concurrency-output-tokens-per-s",
    }
