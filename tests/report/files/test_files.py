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
    out = shown(tmp_path, records=[msgspec.structs.replace(record, arrival_ms=None) for record in RECORDS])
    line = f"{out}: timeline.json left out: no request has its times (arrival_ms, e2e_ms)"
    assert line in capsys.readouterr().err.splitlines()
    assert {path.name for path in out.iterdir()} == folder.FILES.keys() - {"timeline.json"}


def test_a_folder_is_replaced_only_if_asked_and_only_its_own_files(tmp_path: Path) -> None:
    out = shown(tmp_path)
    command = ["show", str(tmp_path / "trace.jsonl"), "--files", str(out)]
    with pytest.raises(InputError, match="not empty; expected a new folder, or --overwrite"):
        main(command)
    (out / "timeline.json").write_text("old")
    assert main([*command, "--overwrite"]) == 0
    assert read(out / "timeline.json")["displayTimeUnit"] == "ms"
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
