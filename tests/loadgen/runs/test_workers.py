"""A run in several workers: one load, one trace, one end, whoever dies on the way."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from tests.jsonoutput import json_of
from tests.warmstart import WarmPopen, warm_children
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

SESSIONS = shlex.split(
    "--pattern multiturn --turns 2 --rate 60 --number 7 --prefix-count 2 --prefix-tokens 40 --prompt-tokens 20:50"
    " --output-tokens 3:9 --seed 4"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def arguments(engine: Any, trace: Path, *flags: str) -> list[str]:
    return ["--url", engine.url, "-o", str(trace), *flags]


def test_equal_run_with_any_number_of_workers(engine: Any, folder: Path) -> None:
    engine.answer = [2000, 2001, 2002]  # the same whoever asks first, so that later prompts are the same too
    seen, summaries, ids = [], [], []
    for procs in (1, 2, 3):
        engine.seen.clear()
        trace = folder / f"{procs}.jsonl"
        summaries.append(json_of(main, arguments(engine, trace, *SESSIONS, "--nonce", "n", "--procs", str(procs))))
        seen.append(sorted(json.dumps(body) for body in engine.seen))
        meta, records = load_trace(trace)
        ids.append(sorted(record.request_id for record in records))
        assert meta.extra.get("workers", 1) == procs
        assert meta.workload is not None
        assert meta.workload.digest == summaries[-1]["digest"]
        ends = [record.end_ms() or 0.0 for record in records]
        assert ends == sorted(ends)
        assert len(summaries[-1]["processes"]) == procs
    assert seen[0] == seen[1] == seen[2]
    assert ids[0] == ids[1] == ids[2]
    for key in ("digest", "sent", "statuses"):
        assert summaries[0][key] == summaries[1][key] == summaries[2][key], key
    for name in ("input_tokens", "output_tokens"):
        assert len({summary["metrics"]["per_request"][name]["mean"] for summary in summaries}) == 1
    assert sorted(os.listdir(folder)) == [f"{procs}.jsonl" for procs in (1, 2, 3)]


@contextlib.contextmanager
def running(engine: Any, trace: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "loadgen", *arguments(engine, trace, *flags)]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    """Worker processes of a run, forked by the nursery or started."""
    if forked := warm_children(process.pid, "loadgen.runs.worker"):
        return forked
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"loadgen.runs.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(count: int, engine: Any, process: "subprocess.Popen[str]") -> None:
    while len(engine.seen) < count:
        assert process.poll() is None
        time.sleep(0.01)


ENDLESS = ("--pattern", "constant", "--rate", "40", "--number", "100000", "--output-tokens", "2", "--procs", "2")


def test_dead_worker_stops_the_run_and_records_stay(engine: Any, folder: Path) -> None:
    trace = folder / "t.jsonl"
    with running(engine, trace, *ENDLESS, "--json") as process:
        wait_for(40, engine, process)
        time.sleep(1.5)  # a worker's records are on the disk within a second
        workers = workers_of(process)
        os.kill(workers[0], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert f"FAILED: worker 0: process {workers[0]} was ended by SIGKILL" in err
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary["interrupted"] == "worker failed"
    _, records = load_trace(trace)
    # The dead one's records are those that its writer had brought to the disk, within the last second.
    assert summary["sent"] == len(records) >= 1
    assert not [name for name in os.listdir(folder) if "part" in name]


def test_interrupt_stops_all_workers_with_a_complete_trace(engine: Any, folder: Path) -> None:
    engine.stalls = True
    trace = folder / "t.jsonl.zst"
    with running(engine, trace, *ENDLESS) as process:
        wait_for(6, engine, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "stopped (SIGTERM)" in out
    _, records = load_trace(trace)
    assert len(records) == len(engine.seen) >= 6
    assert {record.status for record in records} == {"client_abort"}
    # Over both workers: all that the engine had at the signal. One worker may send one more after the other's end.
    assert 6 <= max(record.concurrency or 0 for record in records) <= len(records)
    assert os.listdir(folder) == ["t.jsonl.zst"]


def end(pid: int) -> None:
    """Leave no process behind that was stopped and cannot leave by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_second_interrupt_ends_at_once_and_leaves_the_parts(engine: Any, folder: Path) -> None:
    engine.stalls = True
    trace = folder / "t.jsonl"
    with running(engine, trace, *ENDLESS) as process, contextlib.ExitStack() as stack:
        wait_for(6, engine, process)
        hung = workers_of(process)[0]
        stack.callback(end, hung)
        os.kill(hung, signal.SIGSTOP)  # it will not hear that it is to stop
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    parts = [f"t.jsonl.part{index}.jsonl" for index in (0, 1)]
    assert f"warning: incomplete traces left: {folder / parts[0]}, {folder / parts[1]}" in err
    assert sorted(os.listdir(folder)) == sorted(parts)
    with pytest.raises(InputError, match="left by a killed run; expected another name, or --overwrite"):
        main(arguments(engine, trace, *SESSIONS))
    engine.stalls = False
    assert main(arguments(engine, trace, *SESSIONS, "--overwrite", "--procs", "2")) == 0
    assert os.listdir(folder) == ["t.jsonl"]
