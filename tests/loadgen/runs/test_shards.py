"""A run in several shards: one load, one trace, one end, whoever dies on the way."""

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
from loadgen.core.runflags import RunFlags
from loadgen.runs.driving import RunConfig, shard_count
from tests.jsonoutput import json_of
from tests.warmstart import WarmPopen
from tracefile import InputError, Meta, load_trace

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


def test_however_many_shards_it_is_one_run(engine: Any, folder: Path) -> None:
    engine.answer = [2000, 2001, 2002]  # the same whoever asks first, so that later prompts are the same too
    seen, said, ids = [], [], []
    for procs in (1, 2, 3):
        engine.seen.clear()
        trace = folder / f"{procs}.jsonl"
        said.append(json_of(main, arguments(engine, trace, *SESSIONS, "--nonce", "n", "--procs", str(procs))))
        seen.append(sorted(json.dumps(body) for body in engine.seen))
        meta, records = load_trace(trace)
        ids.append(sorted(record.request_id for record in records))
        assert meta.extra.get("shards", 1) == procs
        assert meta.workload is not None
        assert meta.workload.digest == said[-1]["digest"]
        ends = [record.end_ms() or 0.0 for record in records]
        assert ends == sorted(ends)
        assert len(said[-1]["processes"]) == 2 * procs
    assert seen[0] == seen[1] == seen[2]
    assert ids[0] == ids[1] == ids[2]
    for key in ("digest", "sent_digest", "sent", "statuses"):
        assert said[0][key] == said[1][key] == said[2][key], key
    for name in ("input_tokens", "output_tokens"):
        assert len({one["metrics"]["per_request"][name]["mean"] for one in said}) == 1
    assert sorted(os.listdir(folder)) == [f"{procs}.jsonl" for procs in (1, 2, 3)]


@contextlib.contextmanager
def running(engine: Any, trace: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """``loadgen`` as a process, its progress in ``trace`` + ``.progress``."""
    command = [sys.executable, "-m", "loadgen", *arguments(engine, trace, *flags)]
    process = WarmPopen(
        [*command, "--json-progress", f"{trace}.progress"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def shards_of(trace: Path, process: "subprocess.Popen[str]") -> list[int]:
    """The shards' processes, as soon as the run tells of them."""
    progress = Path(f"{trace}.progress")
    while not progress.exists() or "\n" not in progress.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    status = json.loads(progress.read_text().splitlines()[0])
    return [int(shard["where"].removeprefix("process ")) for shard in status["shards"]]


def wait_for(count: int, engine: Any, process: "subprocess.Popen[str]") -> None:
    while len(engine.seen) < count:
        assert process.poll() is None
        time.sleep(0.01)


ENDLESS = ("--pattern", "constant", "--rate", "40", "--number", "100000", "--output-tokens", "2", "--procs", "2")


def test_when_a_shard_dies_the_others_stop_and_what_was_recorded_is_kept(engine: Any, folder: Path) -> None:
    trace = folder / "t.jsonl"
    with running(engine, trace, *ENDLESS, "--json") as process:
        shards = shards_of(trace, process)
        os.kill(shards[0], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert f"FAILED: shard 0: process {shards[0]} was ended by SIGKILL" in err
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary["interrupted"] == "shard failed"
    assert summary["sent_digest"] is None
    _, records = load_trace(trace)
    # The dead one's records are those that its writer had brought to the disk, within the last second.
    assert summary["sent"] == len(records) >= 1
    assert not [name for name in os.listdir(folder) if "shard" in name]


def test_an_interrupt_stops_all_shards_and_the_trace_is_whole(engine: Any, folder: Path) -> None:
    engine.stalls = True
    trace = folder / "t.jsonl.zst"
    with running(engine, trace, *ENDLESS) as process:
        wait_for(6, engine, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "cut short (SIGTERM)" in out
    _, records = load_trace(trace)
    assert len(records) == len(engine.seen) >= 6
    assert {record.status for record in records} == {"client_abort"}
    # Over both shards: all that the engine had at the signal. One shard may send one more after the other's end.
    assert 6 <= max(record.concurrency or 0 for record in records) <= len(records)
    assert sorted(os.listdir(folder)) == ["t.jsonl.zst", "t.jsonl.zst.progress"]


def end(pid: int) -> None:
    """Leave no process behind that was stopped and cannot leave by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_second_interrupt_ends_it_at_once_and_leaves_the_parts(engine: Any, folder: Path) -> None:
    engine.stalls = True
    trace = folder / "t.jsonl"
    with running(engine, trace, *ENDLESS) as process, contextlib.ExitStack() as stack:
        hung = shards_of(trace, process)[0]
        stack.callback(end, hung)
        os.kill(hung, signal.SIGSTOP)  # it will not hear that it is to stop
        process.send_signal(signal.SIGINT)
        while json.loads(Path(f"{trace}.progress").read_text().splitlines()[-1])["stopping"] != "SIGINT":
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    parts = [f"t.jsonl.shard{index}.jsonl" for index in (0, 1)]
    assert f"warning: left as it was: {folder / parts[0]}, {folder / parts[1]}; --resume goes on with it" in err
    assert sorted(os.listdir(folder)) == sorted([*parts, "t.jsonl.progress"])
    with pytest.raises(InputError, match="left by a run that was killed; expected --resume to go on with it"):
        main(arguments(engine, trace, *SESSIONS))
    engine.stalls = False
    assert main(arguments(engine, trace, *SESSIONS, "--overwrite", "--procs", "2")) == 0
    assert sorted(os.listdir(folder)) == ["t.jsonl", "t.jsonl.progress"]


def test_a_job_that_one_shard_refuses_is_refused(engine: Any, folder: Path) -> None:
    engine.statuses = dict.fromkeys(range(10_000), 400)
    flags = ["--rate", "100", "--number", "100", "--procs", "2"]
    with pytest.raises(InputError, match=r"the engine refuses|expected"):
        main(arguments(engine, folder / "t.jsonl", *flags))
    assert not (folder / "t.jsonl").exists(), "nothing was served, so the corrected command finds no file in its way"


def test_a_shard_whose_requests_are_all_refused_does_not_end_a_run_that_others_answer(
    engine: Any, folder: Path
) -> None:
    """Of this seed's prompts every other one, which is one shard's, is too long for the engine."""
    engine.context = 116
    flags = "--pattern constant --rate 50 --number 8 --seed 358 --prompt-tokens 20:200 --procs 2"
    assert main(arguments(engine, folder / "t", *flags.split())) == 0
    _, records = load_trace(folder / "t")
    assert sorted(record.error or "none" for record in records) == ["http_400"] * 4 + ["none"] * 4


@pytest.mark.parametrize(
    ("procs", "sessions", "parallel", "expected"),
    [(None, None, None, 1), (1, None, None, 1), (4, None, None, 4), (4, 3, None, 3), (4, 9, 2, 2), (2, 1, 5, 1)],
)
def test_no_shard_is_without_a_session_or_a_slot(
    procs: int | None, sessions: int | None, parallel: int | None, expected: int
) -> None:
    drive = RunConfig(
        job=None,  # type: ignore[arg-type]
        url="",
        trace=Path("t"),
        meta=Meta(),
        run=RunFlags(procs=procs),
        sessions=sessions,
        parallel=parallel,
    )
    assert shard_count(drive, cores=2) == expected


@pytest.mark.parametrize("flag", ["0", "-1", "two", "1.5"])
def test_procs_that_are_none(engine: Any, folder: Path, flag: str) -> None:
    with pytest.raises(InputError, match="--procs"):
        main(arguments(engine, folder / "t", *SESSIONS, f"--procs={flag}"))
