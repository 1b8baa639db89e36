"""``report show --files``: both tables by hand-computed numbers, the same as ``--json`` has."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from report.__main__ import main
from tests.measure.metrics.made import request
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta

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


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, Meta(source="client", block_size=16)) as writer:
        for record in RECORDS:
            writer.write(record)
    return path


def by(name: str, path: Path) -> dict[str, dict[str, Any]]:
    return {row[name]: row for row in pq.read_table(path).to_pylist()}


def test_parquet_has_rows_per_request_and_session(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "files"
    assert main(["show", str(trace), "--files", str(out)]) == 0
    requests = by("request_id", out / "requests.parquet")
    assert requests["b"] == requests["b"] | {
        "session_id": "s1", "status": "ok", "arrival_ms": 1000.0, "scheduled_ms": 999.0, "lag_ms": 1.0,
        "cached_tokens": 96, "ttft_ms": 50.0, "ttft_from_schedule_ms": 51.0,
        "tpot_ms": 20.0, "e2e_ms": 90.0, "e2e_per_token_ms": 30.0,
        "interactivity_tps": 50.0, "input_tokens": 120, "output_tokens": 3, "turns": 2,
    }  # fmt: skip
    assert (requests["d"]["status"], requests["d"]["e2e_ms"], requests["d"]["itl_ms"]) == ("error", None, [])
    sessions = by("session_id", out / "sessions.parquet")
    assert sessions["s1"] == sessions["s1"] | {
        "completed": True, "latency_ms": 1090.0, "ttft_ms": 100.0, "ttfat_ms": 1050.0, "requests": 2,
        "hit_rate": 96 / 220,
    }  # fmt: skip
    assert [sessions[name]["completed"] for name in ("s2", "e")] == [False, True]


def test_parquet_overwrites_its_files_only(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "files"
    command = ["show", str(trace), "--files", str(out)]
    assert main(command) == main(command) == 0
    (out / "sessions.parquet").write_text("mine")
    with pytest.raises(InputError, match=r"sessions\.parquet"):
        main(command)
    for position in (tmp_path / "absent" / "files", trace):
        with pytest.raises(InputError, match="expected a folder to write in"):
            main([*command[:3], str(position)])
