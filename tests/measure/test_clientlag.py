"""A client that sent late is named before its latencies are read, by the rule that the client itself goes by."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from measure.live_counts import late_limit_ms
from measure.metrics.client import measure_client
from measure.metrics.results import Client
from measure.runs import load_run
from report.__main__ import main
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Meta, Record, RequestId, Source, Workload


def trace_of(path: Path, lags_ms: Sequence[float], source: Source = "client") -> Path:
    """One request a second, each sent so much after its time."""
    with TraceWriter(path, Meta(source=source, workload=Workload(pattern="constant"))) as writer:
        for number, lag_ms in enumerate(lags_ms):
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    scheduled_ms=1000.0 * number,
                    arrival_ms=1000.0 * number + lag_ms,
                    ttft_ms=100.0,
                    e2e_ms=100.0,
                )
            )
    return path


def notes_of(trace: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", f"load={trace}", "--bootstrap", "20", "--json"])
    notes: list[str] = json.loads(out.getvalue())["notes"]
    return notes


def test_lag_limit_is_5_ms_or_1_percent_of_ttft() -> None:
    assert late_limit_ms(None) == late_limit_ms(499.0) == 5.0
    assert late_limit_ms(2000.0) == 20.0


def client_of(trace: Path) -> Client:
    return measure_client(load_run("x", trace))


def test_a_late_run_is_reported(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.jsonl", [0.1] * 94 + [9.0] * 6)
    message = "the client was late: 6 of 100 late by more than 5.0 ms; lag p99 9.0 ms; repeat it (idle machine, "
    assert any(note.startswith(f"load: {message}") for note in notes_of(trace))


@pytest.mark.parametrize("source", ["tap", "sim"])
def test_trace_without_plan_has_no_lag(tmp_path: Path, source: Source) -> None:
    assert client_of(trace_of(tmp_path / "t.jsonl", [90.0] * 50, source=source)).lag_ms is None
