"""``report show --files``: every file by hand-computed numbers, and the same numbers as ``--json``."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from report.__main__ import main
from report.files import folder
from report.files.folder import tracks
from tests.measure.metrics.made import request
from tracefile import Meta, Record, TraceWriter
from tracefile.records.errors import InputError

# Two sessions and a single request: 2.1 s from the first arrival to the last end.
RECORDS = [
    request(
        "a", 0.0, session_id="s1", turn=1, ttft_ms=100.0, itl_ms=[20.0] * 3, e2e_ms=160.0,
        prompt_tokens=100, cached_tokens=0, output_tokens=4,
    ),
    request(
        "c", 500.0, session_id="s2", turn=1, ttft_ms=200.0, itl_ms=[40.0], e2e_ms=240.0,
        prompt_tokens=300, cached_tokens=0, output_tokens=2,
    ),
    request(
        "b", 1000.0, scheduled_ms=999.0, session_id="s1", turn=2, ttft_ms=50.0, itl_ms=[10.0, 30.0], e2e_ms=90.0,
        prompt_tokens=120, cached_tokens=96, output_tokens=3, max_tokens=3,
    ),
    request("e", 1500.0, ttft_ms=60.0, e2e_ms=60.0, prompt_tokens=10, cached_tokens=0, output_tokens=1),
    request("d", 2000.0, session_id="s2", turn=2, e2e_ms=100.0, status="error", prompt_tokens=310),
]  # fmt: skip


def trace_of(tmp_path: Path, records: Sequence[Record]) -> Path:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, Meta(source="client", block_size=16)) as writer:
        for record in records:
            writer.write(record)
    return path


def shown(tmp_path: Path, *flags: str, records: Sequence[Record] = RECORDS) -> Path:
    """The folder that ``report show --files`` writes."""
    out = tmp_path / "files"
    assert main(["show", str(trace_of(tmp_path, records)), "--files", str(out), *flags]) == 0
    return out


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tables_are_the_same_in_three_forms(tmp_path: Path) -> None:
    out = shown(tmp_path)
    for name in ("requests", "sessions"):
        rows = rows_of(out / f"{name}.jsonl")
        assert pq.read_table(out / f"{name}.parquet").to_pylist() == rows
        with open(out / f"{name}.csv", encoding="utf-8", newline="") as file:
            cells = list(csv.DictReader(file))
        assert [list(row) for row in cells] == [list(row) for row in rows]
        assert cells == [{key: cell_of(value) for key, value in row.items()} for row in rows]
    by_id = {row["request_id"]: row for row in rows_of(out / "requests.jsonl")}
    assert by_id["b"] == by_id["b"] | {
        "session_id": "s1", "status": "ok", "arrival_ms": 1000.0, "scheduled_ms": 999.0, "lag_ms": 1.0,
        "cached_tokens": 96, "ttft_ms": 50.0, "ttft_from_schedule_ms": 51.0, "tbc_ms": [10.0, 30.0],
        "tpot_ms": 20.0, "tpot_veeksha_ms": 20.0, "e2e_ms": 90.0, "e2e_per_token_ms": 30.0,
        "interactivity_tps": 50.0, "input_tokens": 120, "output_tokens": 3, "turns": 2,
    }  # fmt: skip
    assert (by_id["d"]["status"], by_id["d"]["e2e_ms"], by_id["d"]["tbc_ms"]) == ("error", None, [])
    sessions = {row["session_id"]: row for row in rows_of(out / "sessions.jsonl")}
    assert sessions["s1"] == sessions["s1"] | {
        "completed": True, "latency_ms": 1090.0, "ttft_ms": 100.0, "ttfat_ms": 1050.0, "requests": 2,
        "hit_rate": 96 / 220, "eligible_hit_rate_trie": 96 / 104, "eligible_hit_rate": None,
    }  # fmt: skip
    assert [sessions[name]["completed"] for name in ("s2", "e")] == [False, True]


def cell_of(value: Any) -> str:
    if isinstance(value, list):
        return ";".join(map(str, value))
    return "" if value is None else str(value)


def test_evalscopes_sessions_interpolate_quantiles(tmp_path: Path) -> None:
    found = read(shown(tmp_path) / "evalscope/trace_summary.json")
    rows = {row.pop("metric"): row for row in found["rows"]}
    assert found["n_traces"] == 2  # s1 and what completed of s2; a request without a session is none of theirs
    # 1.09 s from a to the end of b, 0.24 s for c: quantiles lie between the two.
    assert rows["Latency (s)"] == pytest.approx(
        {"mean": 0.665, "min": 0.24, "p50": 0.665, "p90": 1.005, "p95": 1.0475, "p99": 1.0815, "max": 1.09}
    )
    means = {name: row["mean"] for name, row in rows.items()}
    assert means == pytest.approx(
        {
            "Latency (s)": 0.665,
            "First-Turn TTFT (s)": 0.15,
            "TTFAT (s)": (1.05 + 0.2) / 2,
            "Decode TPS": 37.5,  # (3 / 60 ms and 2 / 40 ms) and 1 / 40 ms
            "Cache Hit Rate (%)": 96 / 220 * 100 / 2,
            "Eligible Cache Hit Rate (%)": 96 / 104 * 100 / 2,
        }
    )


def test_evalscopes_throughput(tmp_path: Path) -> None:
    out = shown(tmp_path) / "evalscope"
    found = read(out / "workload_throughput.json")
    rows = {row["metric"]: (row["overall"], row["last_window"], row["steady_state"]) for row in found.pop("rows")}
    assert found == {"n_samples": 4, "wall_time_s": 1.56, "last_window_s": 30.0, "warmup_frac": 0.2}
    # The failed d does not count. The steady state, from 0.312 s on, begins at the end before: of a, at 0.16 s.
    for name, tokens, later in (("Total Prompt", 530, 430), ("New Prompt", 434, 334), ("Completion", 10, 6)):
        assert rows[f"{name} tok/s"] == pytest.approx((tokens / 1.56, tokens / 1.56, later / 1.4))
    assert rows["Cached Prompt tok/s"] == pytest.approx((96 / 1.56, 96 / 1.56, 96 / 1.4))
    timeline = read(out / "workload_timeline.json")
    assert timeline["wall_start"] == 0.0
    assert [tuple(point.values()) for point in timeline["points"]] == [
        (0.16, 4, 100, 0), (0.74, 6, 400, 0), (1.09, 9, 424, 96), (1.56, 10, 434, 96),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ends_s", "outputs", "expected"),
    [
        ((10, 25, 50), (10, 20, 40), (1.4, 1.5, 1.5)),  # from 20 s and from 10 s on: both begin at the end at 10 s
        ((0.5, 1), (10, 30), (40.0, 40.0, 60.0)),  # no end before 0.2 s: the first is taken, and its tokens are lost
        ((1,), (10,), (10.0, 10.0, 10.0)),
    ],
)
def test_evalscopes_windows_begin_at_ends(
    tmp_path: Path, ends_s: Sequence[float], outputs: Sequence[int], expected: tuple[float, float, float]
) -> None:
    records = [
        request(f"r{end_s}", 0.0, e2e_ms=end_s * 1000.0, output_tokens=tokens)
        for end_s, tokens in zip(ends_s, outputs, strict=True)
    ]
    rows = read(shown(tmp_path, records=records) / "evalscope/workload_throughput.json")["rows"]
    assert rows[3].pop("metric") == "Completion tok/s"
    assert tuple(rows[3].values()) == pytest.approx(expected)


def test_veekshas_requests(tmp_path: Path) -> None:
    rows = rows_of(shown(tmp_path) / "veeksha/metrics/request_level_metrics.jsonl")
    assert [row["request_id"] for row in rows] == ["a", "c", "b", "e"]
    assert rows[2] == {
        "request_id": "b",
        "session_id": "s1",
        "session_total_requests": 2,
        "scheduler_ready_at": 0.999,
        "scheduler_dispatched_at": 1.0,
        "client_picked_up_at": 1.0,
        "client_completed_at": 1.09,
        "result_processed_at": None,
        "num_delta_prompt_tokens": 16,
        "num_total_prompt_tokens": 120,
        "target_num_delta_prompt_tokens": None,
        "num_output_tokens": 3,
        "num_requested_output_tokens": 3,
        "num_total_tokens": 123,
        "is_stream": True,
        "tpot": 0.02,
        "ttfc": 0.05,
        "end_to_end_latency": 0.09,
        "normalized_end_to_end_latency": 0.03,
        "output_throughput": 33.33333,
        "tbc": [0.01, 0.03],
    }


def test_veekshas_own_example(tmp_path: Path) -> None:
    gaps_ms = [8.14, 6.7, 6.87, 6.11, 6.58, 6.89]
    example = request(
        "75", 537.09, ttft_ms=24.3, itl_ms=gaps_ms, e2e_ms=66.05, prompt_tokens=6, output_tokens=7, max_tokens=7
    )  # fmt: skip
    out = shown(tmp_path, records=[example]) / "veeksha/metrics"
    (row,) = rows_of(out / "request_level_metrics.jsonl")
    told = {"tpot": 0.00688, "ttfc": 0.0243, "end_to_end_latency": 0.06559, "normalized_end_to_end_latency": 0.00937}
    assert row == row | told | {
        "num_total_tokens": 13,
        "num_delta_prompt_tokens": 6,
        "tbc": [0.00814, 0.0067, 0.00687, 0.00611, 0.00658, 0.00689],
    }
    assert row["output_throughput"] == pytest.approx(106.72167, rel=1e-4)


def test_veekshas_figures(tmp_path: Path) -> None:
    out = shown(tmp_path, "--slo", "ttft.p50<=70ms", "--slo", "success>=50%") / "veeksha/metrics"
    assert read(out / "summary_stats.json") == pytest.approx(
        {
            "Number of Requests": 5,
            "Number of Completed Requests": 4,
            "Number of Errored Requests": 1,
            "Number of Cancelled Requests": 0,
            "Error Rate": 0.2,
            "Cancellation Rate": 0.0,
            "Number of Sessions Seen": 3,
            "Successful Sessions": 2,
            "Errored Sessions": 1,
            "Cancelled Sessions": 0,
            "Incomplete Sessions": 0,
            "Observed Session Dispatch Rate": 2 / 1.5,
        }
    )
    # TPOT 20, 20, 40 and, for one token, 0 ms. Six gaps: their p99 lies 0.95 of the way from 30 to 40 ms.
    assert read(out / "throughput_metrics.json") == pytest.approx(
        {"tpot_based_throughput": 50.0, "tbc_based_throughput": 1 / 0.0395}
    )
    # Ours is 60 ms, the second of four, and met; theirs is halfway to the third, and missed.
    (slo,) = read(out / "slo_results.json")["results"]
    assert slo.pop("observed_value") == pytest.approx(0.08)
    assert slo == {
        "met": False,
        "slo_metric_key": "ttfc_p50",
        "threshold": 0.07,
        "percentile": 0.5,
        "metric": "ttfc",
        "name": "ttft.p50<=70ms",
        "lower_is_better": True,
    }
    assert read(out / "slo_results.json")["all_slos_met"] is False
    prefill = read(out / "prefill_stats.json")
    assert (prefill["metric"], prefill["group_by"]) == ("ttfc", "num_delta_prompt_tokens")
    assert {length: group["mean"] for length, group in prefill["groups"].items()} == pytest.approx(
        {"10": 0.06, "16": 0.05, "100": 0.1, "300": 0.2}
    )
    lines = (out / "ttfc.csv").read_text().splitlines()
    assert [lines[0], lines[1], lines[51], lines[101]] == [
        ",cdf,Time to First Chunk", "0,0.0,0.05", "50,0.5,0.06", "100,1.0,0.2",
    ]  # fmt: skip
    assert (
        "SUCCESS CHECK\n" + "=" * 60 + "\nResult: FAILED\n\n  1 of 5 did not end well"
        in (out.parent / "health_check_results.txt").read_text()
    )


def test_the_timeline(tmp_path: Path) -> None:
    events = read(shown(tmp_path) / "timeline.json")["traceEvents"]
    slices = [(one["name"], one["tid"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"]
    assert slices[:3] == [("s1", 1, 0.0, 1090000.0), ("s2", 2, 500000.0, 1600000.0), ("e", 1, 1500000.0, 60000.0)]
    assert slices[3:6] == [("a", 1, 0.0, 160000.0), ("to first token", 1, 0.0, 100000.0), ("decode", 1, 1e5, 60000.0)]
    assert slices[-1] == ("d", 1, 2000000.0, 100000.0)
    assert events[-1]["args"] == {"session": "s2", "turn": 2, "status": "error", "prompt_tokens": 310}


def test_a_span_takes_the_lowest_free_track() -> None:
    assert tracks(np.array([0.0, 1, 2, 5]), np.array([4.0, 3, 6, 7])).tolist() == [0, 1, 2, 0]


def test_what_the_trace_lacks_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(tmp_path, records=[request("a", 0.0, prompt_tokens=5)])
    lines = capsys.readouterr().err.splitlines()
    assert f"{out}: evalscope/trace_summary.json left out: no completed request has a session (session_id)" in lines
    assert f"{out}: timeline.json left out: no request has its times (arrival_ms, e2e_ms)" in lines
    said = {line.removeprefix(f"{out}: ").partition(" ")[0] for line in lines if "left out" in line}
    left_out = {name for name in folder.FILES if any(Path(name).match(pattern) for pattern in said)}
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written | left_out == set(folder.FILES)
    assert not written & left_out


@pytest.mark.parametrize(
    ("lack", "lines"),
    [
        (
            {"output_tokens": None},
            [
                "spans.otlp.jsonl left out: no output_tokens in any request",
                "veeksha/metrics/throughput_metrics.json left out: no completed request has its output length "
                "(output_tokens)",
                "veeksha/metrics/num_output_tokens.csv left out: no completed request or session has output_tokens",
            ],
        ),
        ({"prompt_tokens": None}, ["spans.otlp.jsonl left out: no prompt_tokens in any request"]),
        ({"arrival_ms": None}, ["timeline.json left out: no request has its times (arrival_ms, e2e_ms)"]),
        (
            {"e2e_ms": None},
            [
                "evalscope/*.json left out: no completed request has its times (arrival_ms, e2e_ms)",
                "veeksha/metrics/session_duration.csv left out: no completed request or session has arrival_ms and "
                "e2e_ms",
            ],
        ),
    ],
)
def test_each_lack_is_a_line_with_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lack: dict[str, Any], lines: list[str]
) -> None:
    out = shown(tmp_path, records=[msgspec.structs.replace(record, **lack) for record in RECORDS])
    said = capsys.readouterr().err.splitlines()
    assert {f"{out}: {line}" for line in lines} <= set(said)
    if "output_tokens" in lack:
        rows = rows_of(out / "veeksha/metrics/request_level_metrics.jsonl")
        assert {row["tpot"] for row in rows} == {None}  # unknown, not 0


def test_a_folder_is_replaced_only_if_asked_and_only_its_own_files(tmp_path: Path) -> None:
    out = shown(tmp_path)
    command = ["show", str(tmp_path / "trace.jsonl"), "--files", str(out)]
    with pytest.raises(InputError, match="not empty; expected a new folder, or --overwrite"):
        main(command)
    (out / "evalscope" / "trace_summary.json").write_text("old")
    assert main([*command, "--overwrite"]) == 0
    assert read(out / "evalscope" / "trace_summary.json")["n_traces"] == 2
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds thesis\.txt, which is none of its files"):
        main([*command, "--overwrite"])
    with pytest.raises(InputError, match="its folder is not there"):
        main([*command[:3], str(tmp_path / "absent" / "files")])
    with pytest.raises(InputError, match="is a file; expected a folder"):
        main([*command[:3], str(tmp_path / "trace.jsonl")])
    (inside := tmp_path / "inside").mkdir()
    (tmp_path / "trace.jsonl").rename(inside / "requests.jsonl")
    with pytest.raises(InputError, match="holds the trace"):
        main(["show", str(inside / "requests.jsonl"), "--files", str(inside), "--overwrite"])


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(folder.FILES, "timeline.json", fail)
    with pytest.raises(InputError, match="No space left on device; expected a writable folder"):
        shown(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
