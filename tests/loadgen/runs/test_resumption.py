"""A run that is killed and gone on with: every planned request is recorded once, whatever was killed and when."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.runs.merging import parts_of, record_lines
from loadgen.runs.resumption import HISTORY, ended_requests, last_header
from scripts.proxybench.processes import ended
from tracefile import InputError, Meta, Record, RequestId, TraceWriter, load_trace

ROOT = Path(__file__).parent.parent.parent.parent
SESSIONS, TURNS = 40, 3


def flags(engine: Any, trace: Path, *more: str) -> list[str]:
    load = f"--rate 30 --number {SESSIONS} --pattern multiturn --turns {TURNS} --think 0:0.05s --seed 4"
    lengths = "--prompt-tokens 20 --output-tokens 4"
    return ["--url", engine.url, "-o", str(trace), *load.split(), *lengths.split(), *more]


def test_requests_cancelled_at_a_hard_end_are_not_sent_again(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Meta()) as writer:
        for name, error in {"killed": None, "cancelled": "deadline"}.items():
            writer.write(Record(request_id=RequestId(name), status="client_abort", error=error))
        writer.write(Record(request_id=RequestId("done")))
    assert ended_requests(tmp_path / "t") == {"cancelled": False, "done": True}


def recorded(trace: Path) -> int:
    """Records that are on the disk by now."""
    return sum(1 for path in (trace, *parts_of(trace)) if path.exists() for _ in record_lines(path))


@contextlib.contextmanager
def midway(engine: Any, argv: Sequence[str], trace: Path, enough: int) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a run and give it as soon as so much is on the disk. The engine answers not all of it before the block's
    end: however late that much is seen, the run has not ended."""
    engine.stalls_from = len(engine.seen) + 40
    run = subprocess.Popen([sys.executable, "-m", "loadgen", *argv], cwd=ROOT, stderr=subprocess.DEVNULL)
    while recorded(trace) < enough:
        assert run.poll() is None
        time.sleep(0.02)
    yield run
    engine.stalls_from = float("inf")


def kill_midway(engine: Any, argv: Sequence[str], trace: Path, enough: int) -> None:
    """Start a run and end all of its processes at once, as soon as so much is on the disk."""
    with midway(engine, argv, trace, enough) as run:
        kill(run)


def kill(run: "subprocess.Popen[bytes]") -> None:
    pids = [run.pid, *descendants(run.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it may have left by itself since it was listed
            os.kill(pid, signal.SIGKILL)
    run.wait()
    while not all(map(ended, pids)):  # a process holds its file's lock until it has ended
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def check_whole(trace: Path) -> list[Record]:
    """Every session has all of its turns, once, each after the one before."""
    records = load_trace(trace)[1]
    assert not [request for request, count in Counter(record.request_id for record in records).items() if count > 1]
    assert Counter((record.turn, record.status) for record in records) == {
        (turn + 1, "ok"): SESSIONS for turn in range(TURNS)
    }
    ends = {record.request_id: record.end_ms() or 0.0 for record in records}
    assert len({record.session_id for record in records}) == SESSIONS
    assert all((record.arrival_ms or 0) >= ends[record.parent_id] for record in records if record.parent_id)
    return records


@pytest.mark.parametrize("procs", ["1", "3"])
def test_a_killed_run_goes_on_to_the_same_requests(engine: Any, tmp_path: Path, procs: str) -> None:
    trace = tmp_path / "t.jsonl"
    argv = flags(engine, trace, "--procs", procs)
    kill_midway(engine, argv, trace, enough=20)
    before = recorded(trace)
    assert main([*argv, "--resume"]) == 0
    check_whole(trace)
    assert not parts_of(trace)
    history = last_history(trace)
    assert len(history) == 1
    assert history[0]["kept"] + history[0]["dropped"] == before


def test_a_run_may_be_killed_again_and_again(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    argv = flags(engine, trace, "--procs", "2")
    kill_midway(engine, argv, trace, enough=1)
    # A merge that was killed before it had removed its parts leaves what they hold twice.
    shutil.copy(parts_of(trace)[0], trace)
    kill_midway(engine, [*argv, "--resume"], trace, enough=recorded(trace) + 1)
    assert main([*argv, "--resume", "--procs", "1"]) == 0
    check_whole(trace)
    shifts = [each["shift_ms"] for each in last_history(trace)]
    assert shifts == sorted(shifts)


def test_a_run_cut_short_by_ctrl_c_is_completed(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    argv = flags(engine, trace)
    with midway(engine, argv, trace, enough=5) as run:
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert main([*argv, "--resume"]) == 0
    check_whole(trace)


def test_what_is_there_must_be_of_the_same_load(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    assert main(flags(engine, trace, "--duration", "0.1s")) == 0
    with pytest.raises(InputError, match=r"--resume: .*t\.jsonl: is of workload .*; expected .* the same flags"):
        main([*flags(engine, trace, "--duration", "0.2s"), "--resume"])


def test_a_clock_set_back_between_the_runs_is_refused(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = flags(engine, tmp_path / "t.jsonl", "--duration", "0.1s")
    assert main(argv) == 0
    monkeypatch.setattr("loadgen.runs.resumption.time", SimpleNamespace(time_ns=lambda: 0))
    with pytest.raises(InputError, match=r"--resume: .*t\.jsonl: its last record is [\d,]+ s ahead of the clock"):
        main([*argv, "--resume"])


def test_nothing_there_is_a_run_from_the_beginning(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    assert main(flags(engine, trace, "--resume")) == 0
    check_whole(trace)


def last_history(trace: Path) -> list[dict[str, Any]]:
    workload = last_header(trace).workload
    assert workload is not None
    history: list[dict[str, Any]] = workload.extra[HISTORY]
    return history
