"""A client that sent late is named before its latencies are read, by the rule that the client itself goes by."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from measure.lateness import late_limit_ms
from measure.runs import load_run
from measure.waits import client_lag
from report.__main__ import main
from tracefile import Meta, Record, RequestId, TraceWriter, Workload
from tracefile.records.schema import Source


def trace_of(
    path: Path,
    lags_ms: Sequence[float | None],
    *,
    ttft_ms: float = 100.0,
    source: Source = "client",
    **workload: object,
) -> Path:
    """One request a second, each sent so much after its time; null: it had none."""
    with TraceWriter(path, Meta(source=source, workload=Workload(pattern="constant", extra=workload))) as writer:
        for number, lag_ms in enumerate(lags_ms):
            due_ms = None if lag_ms is None else 1000.0 * number
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    scheduled_ms=due_ms,
                    arrival_ms=1000.0 * number + (lag_ms or 0.0),
                    ttft_ms=ttft_ms,
                    e2e_ms=ttft_ms,
                )
            )
    return path


def notes_of(trace: Path) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", f"load={trace}", "--bootstrap", "20", "--json"])
    notes: list[str] = json.loads(out.getvalue())["notes"]
    return notes


def test_the_limit_is_5_ms_or_a_hundredth_of_the_ttft() -> None:
    assert late_limit_ms(None) == late_limit_ms(499.0) == 5.0
    assert late_limit_ms(2000.0) == 20.0


def test_a_late_run_is_said_to_be(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.jsonl", [0.1] * 97 + [9.0, 9.0, 9.0])
    said = "the client was late: lag p99 9.0 ms is above 5.0 ms (3 of 100 requests are); trust none of its latencies"
    assert f"load: {said}: repeat it on an idle machine." in notes_of(trace)


def test_a_slow_engine_allows_as_much_more(tmp_path: Path) -> None:
    lag = client_lag(load_run("x", trace_of(tmp_path / "t.jsonl", [9.0] * 50, ttft_ms=1000.0)))
    assert lag is not None
    assert (lag.requests, lag.limit_ms, lag.late, lag.flagged) == (50, 10.0, 0, False)


def test_one_late_request_of_many_is_no_late_run(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.jsonl", [*[0.0] * 199, 50.0])
    lag = client_lag(load_run("x", trace))
    assert lag is not None
    assert (lag.late, lag.flagged) == (1, False)
    assert not [note for note in notes_of(trace) if "late" in note]


@pytest.mark.parametrize("source", ["tap", "sim"])
def test_who_plans_nothing_is_not_late(tmp_path: Path, source: Source) -> None:
    assert client_lag(load_run("x", trace_of(tmp_path / "t.jsonl", [90.0] * 50, source=source))) is None


def test_waiting_for_a_slot_is_no_lateness(tmp_path: Path) -> None:
    assert client_lag(load_run("x", trace_of(tmp_path / "t.jsonl", [90.0] * 50, parallel=4))) is None
    assert client_lag(load_run("x", trace_of(tmp_path / "u.jsonl", [90.0] * 50, parallel=None))) is not None
    assert client_lag(load_run("x", trace_of(tmp_path / "v.jsonl", [None] * 50))) is None
