"""``report sweep``: literal sweeps, their intervals, what is left out, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from measure.sweepindex import read_sweep
from report.__main__ import main
from report.sweeps.contrasts import ratio_of_repeats
from tests.jsonoutput import json_of
from tests.report.sweeps.conftest import A, B, MakeSweep, Pace, write_run
from tracefile import Engine, Workload
from tracefile.records.errors import InputError

CAPTURES = Path(__file__).parents[3] / "data" / "captures"


def sweep_of(*arguments: object) -> Any:
    return json_of(main, ["sweep", *map(str, arguments)])


def test_points_have_the_metrics_of_their_runs(make_sweep: MakeSweep) -> None:
    found = sweep_of(make_sweep({"A": A, "B": B}), "--gpus", 2)["workloads"][0]
    assert (found["name"], found["load"]) == ("", "parallel")
    first, second = found["lines"][0]["points"]
    told = {name: value and value["median"] for name, value in first["values"].items()}
    assert told == pytest.approx(
        {
            "requests": 80,
            "rps": 80 / 3.0,
            "gen_tps": 880 / 3.0,
            "success": 1.0,
            "in_flight": 8.0,
            "ttft_p50_ms": 100.0,
            "ttft_p90_ms": 100.0,
            "tpot_p50_ms": 20.0,
            "interactivity_tps": 50.0,
            "session_latency_p90_ms": 600.0,
            "hit_rate": 96 / 208,
            "eligible_hit_rate": 1.0,
            "throughput_tps": 880 / 3.0,
            "throughput_tps_per_gpu": 440 / 3.0,
            "goodput_share": None,
            "goodput_per_s": None,
        }
    )
    assert second["values"]["eligible_hit_rate"]["median"] == 0.5
    assert [point["pareto"] for point in (first, second)] == [
        ["interactivity", "latency"],
        ["interactivity", "latency"],
    ]


def test_a_load_that_another_load_dominates_is_not_in_the_set(make_sweep: MakeSweep) -> None:
    crowded = {**A, 32: [Pace(ttft_ms=2000.0, gap_ms=200.0)]}
    points = sweep_of(make_sweep({"A": crowded}))["workloads"][0]["lines"][0]["points"]
    assert [point["pareto"] for point in points] == [["interactivity", "latency"], ["interactivity", "latency"], []]


def test_labels_meet_at_equal_loads_and_at_equal_interactivity(make_sweep: MakeSweep) -> None:
    pair = sweep_of(make_sweep({"A": A, "B": B}))["workloads"][0]["contrasts"][0]
    assert (pair["label"], pair["against"], pair["interactivity_tps"]) == ("B", "A", 45.0)
    assert pair["throughput"]["value"] == pytest.approx(497.619 / 305.0667, rel=1e-4)
    at = {point["load"]: {name: one["value"] for name, one in point["ratios"].items()} for point in pair["points"]}
    assert at[8.0] == pytest.approx(
        {
            "throughput_tps": 1.5,
            "ttft_p50_ms": 1.0,
            "ttft_p90_ms": 1.0,
            "interactivity_tps": 2.0,
            "session_latency_p90_ms": 2 / 3,
        }
    )


def test_equal_sessions_have_an_interval_without_width(make_sweep: MakeSweep) -> None:
    pair = sweep_of(make_sweep({"A": A, "B": B}))["workloads"][0]["contrasts"][0]
    ratio = pair["points"][0]["ratios"]["throughput_tps"]
    assert ratio == pytest.approx({"value": 1.5, "low": 1.5, "high": 1.5, "by": "sessions", "units": 40})


def test_repeats_have_the_t_interval_of_their_ratios(make_sweep: MakeSweep) -> None:
    found = ratio_of_repeats(1.3, [12.0, 30.0], [10.0, 20.0])  # √1.8 times e^±(6.3138 · ln 1.25 / 2)
    assert (found.value, found.low, found.high) == pytest.approx((1.3, 0.66326, 2.71385), rel=1e-4)
    found = ratio_of_repeats(2.0, [12.0, 15.0], [6.0])  # √5 times e^±(6.3138 · ln 1.25 / √2 · √1.5)
    assert (found.by, found.units) == ("runs", 3)
    assert (found.low, found.high) == pytest.approx((0.66008, 7.57488), rel=1e-4)
    slower = [Pace(gap_ms=20.0), Pace(gap_ms=30.0), Pace(gap_ms=25.0)]
    workload = sweep_of(make_sweep({"A": {8: slower}, "B": {8: [Pace(gap_ms=10.0)] * 3}}))["workloads"][0]
    value = workload["lines"][0]["points"][0]["values"]["interactivity_tps"]
    assert value == pytest.approx({"median": 40.0, "low": 100 / 3, "high": 50.0})
    ratio = workload["contrasts"][0]["points"][0]["ratios"]["interactivity_tps"]
    assert (ratio["by"], ratio["units"], ratio["value"]) == ("repeats", 3, 2.5)


def test_few_sessions_and_given_rates_have_no_interval(make_sweep: MakeSweep) -> None:
    few = sweep_of(make_sweep({"A": {1: [Pace()]}, "B": {1: [Pace()]}}, "few"))["workloads"][0]["contrasts"][0]
    rated = make_sweep({"A": {2.0: [Pace()]}, "B": {2.0: [Pace()]}}, "rated", of="rate")
    pair = sweep_of(rated)["workloads"][0]["contrasts"][0]
    for ratio in (few["points"][0]["ratios"]["ttft_p50_ms"], pair["points"][0]["ratios"]["throughput_tps"]):
        assert (ratio["value"], ratio["low"], ratio["by"]) == (1.0, None, None)
    assert pair["points"][0]["ratios"]["ttft_p50_ms"]["low"] is None  # slots that are never idle: one busy period
    assert few["points"][0]["ratios"]["ttft_p50_ms"]["units"] == 5


def printed(capsys: pytest.CaptureFixture[str], arguments: Sequence[object], code: int = 0) -> list[str]:
    assert main(["sweep", *map(str, arguments)]) == code
    return capsys.readouterr().out.splitlines()


def test_the_verdict_names_throughput_and_the_largest_load(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep({"A": A, "B": B, "C": {8: ["failed"]}})
    lines = printed(capsys, [folder, "--slo", "tpot.p90<=30ms"])
    assert lines[0] == (
        "At 45 tok/s per user B gives 1.63 times A's output tokens per second (1.63 to 1.63 by 40 sessions of one "
        "run each); tpot.p90<=30ms: met with A at no load above concurrency 8, with B at every load."
    )
    assert lines[1] == (
        "At concurrency 16 B gives 1.43 times A's output tokens per second (1.43 to 1.43 by 80 sessions of one run "
        "each), and B's TTFT p90 is that of A: 100 ms against 100 ms (1 to 1 by 80 sessions of one run each)."
    )
    assert lines[2] == "left out: C-8-r1: failed (killed)"
    overview = next(line.split() for line in lines if line.startswith("A "))
    assert overview == ["A", "8", "–", "80", "26.7", "293", "100", "%", "293", "8", "46.2", "%", "100", "%"]
    assert max(map(len, lines[3:])) <= 120


def test_a_label_without_a_load_within_its_slos_is_exit_code_1(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep({"A": A, "B": B})
    lines = printed(capsys, [folder, "--slo", "A.tpot.p90<=15ms"], 1)
    assert lines[0].endswith("; A.tpot.p90<=15ms: met with A at no load.")
    printed(capsys, [folder, "--slo", "B.tpot.p90<=15ms", "--slo", "tpot.p90<=30ms"])


def test_repeats_are_a_row_of_ranges(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [make_sweep({"A": {8: [Pace(), Pace(ttft_ms=150.0)]}})])
    assert lines[0] == "A gives at most 251 output tokens per second, at concurrency 8, 50 of them to each user."
    row = next(at for at, line in enumerate(lines) if "TTFT p50" in line) + 1
    assert [line.split() for line in lines[row : row + 2]] == [
        ["A", "8", "100", "100", "20.0", "50", "600", "i", "l"],
        ["2", "repeats", "100–150", "100–150", "600–700"],
    ]


def test_traces_of_one_label_are_the_points_of_its_line(tmp_path: Path) -> None:
    write_run(tmp_path / "a1.jsonl", 2, Pace())
    write_run(tmp_path / "a2.jsonl", 4, Pace())
    told = Pace(meta={"workload": Workload(pattern="closed", extra={"parallel": 3})})
    write_run(tmp_path / "b.jsonl", 3, told)
    found = sweep_of(*(f"{label}={tmp_path / name}.jsonl" for label, name in (("A", "a1"), ("A", "a2"))))
    assert found["workloads"][0]["load"] == "in_flight"
    assert [point["load"] for point in found["workloads"][0]["lines"][0]["points"]] == pytest.approx([2.0, 4.0])
    found = sweep_of(f"B={tmp_path / 'b.jsonl'}")["workloads"][0]
    assert (found["load"], found["lines"][0]["points"][0]["load"]) == ("parallel", 3.0)


OTHER_ENGINE = {"engine": Engine(name="vllm", version="0.32.0", block_size=32)}


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            {"A": {8: [Pace(), Pace(meta={"model": "large"})]}},
            "A-8-r2 differs from A-8-r1 in model: large, there tiny; give it as WORKLOAD/LABEL",
        ),
        (
            {"A": {8: [Pace()]}, "B": {8: [Pace(meta={"source": "sim"})]}},
            "B-8-r1 differs from A-8-r1 in source: a simulation, there a measurement; ",
        ),
        (
            {"A": {8: [Pace(), Pace(meta=OTHER_ENGINE)]}},
            "A-8-r2 differs from A-8-r1 in engine.block_size: 32, there 16; a label is one configuration",
        ),
        (
            {"A": {8: [Pace()], 16: [Pace(prompt_tokens=320)]}},
            "A-16-r1 differs from A-8-r1 in its workload: mean prompt 328 tokens, there 104; ",
        ),
    ],
)
def test_a_run_of_another_kind_is_refused(make_sweep: MakeSweep, labels: Any, said: str) -> None:
    folder = make_sweep(labels)
    with pytest.raises(InputError) as error:
        main(["sweep", str(folder)])
    assert str(error.value).startswith(said)
    assert sweep_of(folder, "--mixed")["notes"] == [said.partition(";")[0]]


def test_labels_of_two_workloads_are_apart(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {f"chat/{label}": loads for label, loads in (("A", A), ("B", B))}
    code = {f"code/{label}": {8: [Pace(prompt_tokens=960)]} for label in "AB"}
    folders = [make_sweep(chat, "chat"), make_sweep(code, "code", of="rate")]
    lines = printed(capsys, folders)
    assert lines[0] == (
        "With B, TTFT p90 is 100 % to 100 % of A's, and output tokens per second are 1 to 1.5 times as many, over 3 "
        "loads of 2 workloads."
    )
    assert [line for line in lines if line in ("chat", "code")] == ["chat", "code"]


def test_rates_beside_limits_are_refused(make_sweep: MakeSweep) -> None:
    folders = [make_sweep({"A": A}), make_sweep({"B": {2.0: [Pace()]}}, "rates", of="rate")]
    with pytest.raises(InputError, match=r"^B-2-r1 has rate 2, A-8-r1 concurrency 8; expected one of them in all runs"):
        main(["sweep", *map(str, folders)])
    assert sweep_of(*folders, "--mixed")["workloads"][0]["load"] == "in_flight"


def test_bad_input_is_one_line(make_sweep: MakeSweep, tmp_path: Path) -> None:
    folder = make_sweep({"A": {8: [Pace(fails=True)], 16: ["cut"]}})
    for arguments, said in (
        ([folder], "no run is left to report: A-16-r1: cut (killed); A-8-r1: none of 80 requests completed; expected"),
        (["here"], "here: expected a folder with sweep.jsonl, or LABEL=TRACE"),
        ([tmp_path], "no sweep.jsonl is there"),
        (["A=absent.jsonl"], "absent.jsonl: No such file"),
        ([make_sweep({"A": A}, "good"), "--slo", "lag.p99<=5ms"], "A-8-r1.jsonl has no lag"),
        ([folder, "--slo", "C.ttft.p90<=5ms"], "no compared label 'C'; expected one of A"),
        ([folder, "--gpus", "0"], "--gpus: 0; expected 1 or more"),
    ):
        with pytest.raises(InputError) as error:
            main(["sweep", *map(str, arguments)])
        assert said in str(error.value)


@pytest.mark.parametrize("shape", ["128x2", "256x4"])
def test_the_captures_index_is_that_of_their_manifests(shape: str) -> None:
    runs = read_sweep(CAPTURES / shape)
    assert len(runs) == 28
    for run in runs:
        trace = CAPTURES / shape / run.trace
        manifest = json.loads(trace.with_name(trace.name.replace(".jsonl.zst", ".manifest.json")).read_text())
        assert (run.command, run.started, run.duration_s) == (
            manifest["command"],
            manifest["began_utc"],
            manifest["wall_s"],
        )
        assert run.repeat == (2 if "-again" in run.trace else 1)
        assert run.label.rpartition("/")[2] == {"again": "warm"}.get(manifest["way"], manifest["way"])


def test_the_captures_are_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [CAPTURES / "256x4", "--bootstrap", "0"])
    assert lines[0].startswith("With warm, TTFT p90 is 2.4 % to 55.8 % of uncached's, and output tokens per second are")
    assert [line for line in lines if line.startswith("256x4")] == [
        f"256x4 {workload}" for workload in ("sessions", "short sessions", "poisson", "staircase", "burst")
    ]
    assert (
        "warm's TTFT p90 is 42.4 times shorter than uncached's: 526 ms against 22.3 s (7.78 to 174 by 3 runs)"
        in lines[4]
    )
