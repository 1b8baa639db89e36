"""``loadgen sweep``: literal orders, real engines over sockets, runs that go on where they were killed."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.facts import EngineFacts
from loadgen.__main__ import main
from loadgen.plan.config import LoadConfig
from loadgen.plan.workload import Workload
from loadgen.runs.outcome import RunOutcome, recorded
from loadgen.runs.summary import RunResult, end_run
from loadgen.sweeping import warm_up_of
from loadgen.sweepplan import in_order, parse_sweep
from measure.sweepindex import INDEX, SweepRun, read_sweep
from report.__main__ import main as report
from tests.conftest import StartSimServer
from tests.jsonoutput import json_of
from tests.warmstart import WarmPopen
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId

LOAD = ["--number", "2", "--prompt-tokens", "40", "--output-tokens", "2", "--seed", "3"]
EMBEDDED = ["--block-size", "16", "--num-gpu-blocks", "512", "--t0-ms", "1"]


FAILING: dict[str, InputError | None] = {}
"""Runs that ``sent`` lets fail: by an error, or by requests that all fail."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoadConfig]]:
    """Loads that a sweep sends, in order, each recorded at once as two requests of 5 ms."""
    configs: list[LoadConfig] = []

    def send(config: LoadConfig, position: object) -> RunResult:
        configs.append(config)
        name = config.trace.name.partition(".")[0]
        if (error := FAILING.get(name)) is not None:
            raise error
        with TraceWriter(config.trace, Meta(), overwrite=True) as writer:
            for number in range(2):
                request = RequestId(f"{number}")
                good = Record(request_id=request, arrival_ms=0.0, ttft_ms=5.0, e2e_ms=5.0, status="ok")
                bad = Record(request_id=request, arrival_ms=0.0, e2e_ms=5.0, status="error", error="http_503")
                writer.write(bad if name in FAILING else good)
        tally, seconds = recorded(config.trace)
        outcome = RunOutcome(
            tally=tally,
            findings={},
            digest="",
            stopped=None,
            failures=[],
            seconds=seconds,
            cpu_s=[],
        )
        facts = (EngineFacts(), EngineFacts())
        return end_run(outcome, config, pattern="", facts=facts, notes=["seen once"])

    monkeypatch.setattr("loadgen.sweeping.send_load", send)
    yield configs
    FAILING.clear()


def sweep(folder: Path, *flags: str) -> list[str]:
    return ["sweep", "-o", str(folder), *LOAD, "--warm-up", "0", *flags]


def names(runs: Sequence[SweepRun]) -> list[tuple[str, str]]:
    return [(run.run, run.status) for run in runs]


def ordered(labels: str, points: Sequence[float], repeats: int) -> str:
    return " ".join(f"{label}{point:g}" for label, point, _ in in_order(labels, points, repeats))


def test_label_order_alternates_and_reverses_at_each_repeat() -> None:
    assert ordered("AB", [8, 16, 24], 2) == "A8 B8 B16 A16 A24 B24 B8 A8 A16 B16 B24 A24"
    assert ordered("AB", [8, 16], 2) == "A8 B8 B16 A16 B8 A8 A16 B16"
    assert ordered("ABC", [8, 16], 1) == "A8 B8 C8 C16 B16 A16"
    assert ordered("A", [0.5, 1], 2) == "A0.5 A1 A0.5 A1"


def test_sweep_runs_are_separate_commands() -> None:
    words = "--rate 0.5,2 --parallel 9 --duration 60s --variant"
    plan = parse_sweep([*words.split(), "chat/A: --url http://a --header 'X: y'", "--variant", "B: --url http://b"])
    assert [run.name for run in plan.runs] == ["chat-A-rate0.5-r1", "B-rate0.5-r1", "B-rate2-r1", "chat-A-rate2-r1"]
    assert shlex.join(plan.runs[0].argv) == (
        "--duration 60s --parallel 9 --url http://a --header 'X: y' --rate 0.5 -o sweep/chat-A-rate0.5-r1.jsonl.zst"
    )
    assert (plan.runs[0].config.rate, plan.runs[0].config.parallel, plan.runs[0].parallel) == (0.5, 9, None)
    assert plan.command.startswith("loadgen sweep --rate 0.5,2 --parallel 9 ")


@pytest.mark.parametrize(
    "load",
    [
        "--rate 2 --pattern multiturn --number 9 --turns 3 --think 2s",
        "--parallel 2 --dataset trace:data/captures/128x2/session-fast.jsonl.zst --turns 4:9 --think 1s",
    ],
)
def test_a_warm_up_is_a_closed_loop_of_single_requests(load: str) -> None:
    config = parse_sweep(["--url", "http://a", *load.split()]).runs[0].config
    made = warm_up_of(config, 5, Path("w"), 1)
    assert (made.open_loop, made.single_turns, made.number, made.duration_s) == (False, True, 5, None)
    first = next(iter(Workload(made)))
    assert first.turns[0].prompt_key != next(iter(Workload(config))).turns[0].prompt_key


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--url http://a --number 1", "--parallel, --rate: missing; expected points such as --parallel 8,16,24"),
        ("--url http://a --parallel 8,x", "--parallel: '8,x'; expected numbers with commas"),
        ("--url http://a --parallel 8,16 --rate 1,2 --number 1", "--parallel, --rate: several values of both;"),
        ("--parallel 8 --variant '--url http://a'", "--variant: '--url http://a'; expected 'LABEL: FLAGS'"),
        (
            "--parallel 8 --variant 'A: --url http://a' --variant 'A: --url http://b'",
            "--variant A: same file name as A; expected different labels",
        ),
    ],
)
def test_bad_flags_are_one_line_before_any_request(flags: str, error: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_sweep(shlex.split(flags))
    assert str(raised.value).startswith(error)


def test_variants_get_equal_loads_with_empty_caches(
    start_sim_server: StartSimServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ab"
    with start_sim_server(*EMBEDDED) as a, start_sim_server(*EMBEDDED) as b:
        variants = ["--variant", f"A: --url {a}", "--variant", f"B: --url {b}"]
        flags = [*sweep(folder, "--parallel", "1,2", "--turns", "2", *variants), "--warm-up", "1"]
        assert main(flags) == 0
        printed = capfd.readouterr()
        assert main(flags) == 0  # all is there
        assert "run 1 of 4" not in capfd.readouterr().err
    runs = read_sweep(folder)
    assert names(runs) == [("A-p1-r1", "done"), ("B-p1-r1", "done"), ("B-p2-r1", "done"), ("A-p2-r1", "done")]
    assert sorted(path.name for path in folder.iterdir()) == sorted([INDEX, *(run.trace for run in runs)])
    loads = [load_trace(folder / run.trace) for run in runs]
    for meta, records in loads:
        # Two sessions of two turns: the first turns share nothing, and an earlier run's prompts are gone.
        cached = {(record.turn, bool(record.cached_tokens)) for record in records}
        assert cached == {(1, False), (2, True)}
        assert meta.workload is not None
        assert (meta.workload.extra["sweep"]["warm_up_requests"], meta.workload.extra["sweep"]["cache"]) == (1, "reset")
    (meta, first), (other_meta, second) = loads[:2]
    assert meta.workload is not None
    assert other_meta.workload is not None
    assert meta.workload.digest == other_meta.workload.digest
    assert {record.request_id for record in first} == {record.request_id for record in second}
    assert "loadgen sweep: run 3 of 4, B-p2-r1\n  4 of 4 requests in " in printed.err
    assert printed.out.splitlines()[0] == "4 of 4 runs done; compare them with:"
    shown = json_of(report, ["show", str(folder)])
    assert [point["name"] for point in shown["points"]] == [f"{tag} at concurrency {n}" for tag in "AB" for n in (1, 2)]


def test_different_tokens_without_cache_reset(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.has_reset = False
    assert main(sweep(tmp_path / "s", "--parallel", "1,2", "--url", engine.url)) == 0
    captured = capsys.readouterr()
    assert "note: s: no reset of the prefix cache: every run sends different tokens" in captured.err
    prompts = [tuple(body["prompt"]) for body in engine.seen]
    assert len(prompts) == len(set(prompts)) == 4
    assert {len(prompt) for prompt in prompts} == {40}
    nonces = [shlex.split(run.command)[-1] for run in read_sweep(tmp_path / "s")]
    assert [nonce.partition("~")[2] for nonce in nonces] == ["1", "2"]
    assert len({nonce.partition("~")[0] for nonce in nonces}) == 1


def test_failed_run_is_recorded_and_the_sweep_continues(
    engine: Any, sent: list[LoadConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["--variant", f"A: --url {engine.url}", "--variant", f"B: --url {engine.url}/v1 --timeout 90s"]
    flags = sweep(tmp_path / "s", "--parallel", "1,2", *variants)
    FAILING["B-p1-r1"] = None
    FAILING["B-p2-r1"] = InputError("--url: connection refused")
    assert main(flags) == 1
    runs = read_sweep(tmp_path / "s")
    assert names(runs) == [("A-p1-r1", "done"), ("B-p1-r1", "failed"), ("B-p2-r1", "failed"), ("A-p2-r1", "done")]
    assert [run.reason for run in runs[1:3]] == ["no request completed (2 http_503)", "--url: connection refused"]
    captured = capsys.readouterr()
    assert "  FAILED: no request completed (2 http_503)" in captured.err
    assert "B-p1-r1: FAILED: no request completed (2 http_503)" in captured.out
    FAILING.clear()
    sent.clear()
    assert main(flags) == 0  # the engine works again: failed runs are made again, and only those
    assert [config.trace.name for config in sent] == ["B-p1-r1.jsonl.zst", "B-p2-r1.jsonl.zst"]
    assert [status for _, status in names(read_sweep(tmp_path / "s"))] == ["done"] * 4


def test_folder_of_another_sweep_is_refused(engine: Any, sent: list[LoadConfig], tmp_path: Path) -> None:
    folder = tmp_path / "s"
    flags = sweep(folder, "--parallel", "1", "--url", engine.url)
    assert main(flags) == 0
    for other in (
        [*flags, "--seed", "4"],
        [*flags, "--nonce", "4"],
        sweep(folder, "--parallel", "2", "--url", "http://a"),
    ):
        with pytest.raises(InputError, match=r"has run s-p1-r1 of loadgen .*; expected another folder"):
            main(other)
    (folder / INDEX).unlink()
    with pytest.raises(InputError, match=r"has other files and no sweep\.jsonl; expected a new folder, or a sweep's"):
        main(flags)


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_sweep_continues_with_missing_runs(engine: Any, tmp_path: Path, ended_by: int) -> None:
    folder, engine.has_reset = tmp_path / "s", False
    flags = sweep(folder, "--parallel", "1,2", "--url", engine.url)
    running = WarmPopen([sys.executable, "-m", "loadgen", *flags], stderr=subprocess.PIPE, text=True)
    while len(engine.seen) < 2:
        time.sleep(0.01)
    engine.first_token_s = 60.0  # the second run is in hand for as long as it takes
    while len(engine.seen) < 3:
        assert running.poll() is None
        time.sleep(0.01)
    first, second = read_sweep(folder)
    assert (first.status, second.status, second.reason) == ("done", "cut", "started, not ended")
    running.send_signal(ended_by)
    _, err = running.communicate(timeout=20)
    engine.first_token_s = 0.0
    if ended_by == signal.SIGINT:
        assert running.returncode == 130
        assert read_sweep(folder)[1].reason == "SIGINT"
        assert err.splitlines()[-1] == f"loadgen sweep: interrupted; continue with: {shlex.join(['loadgen', *flags])}"
    sent = len(engine.seen)
    assert main(flags) == 0
    assert len(engine.seen) == sent + 2
    runs = read_sweep(folder)
    assert runs[0] == first
    assert names(runs) == [("s-p1-r1", "done"), ("s-p2-r1", "done")]
    assert [record.status for record in load_trace(folder / runs[1].trace)[1]] == ["ok", "ok"]
