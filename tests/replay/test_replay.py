"""``replay`` as a user runs it, against scripted engines over real sockets."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main as loadgen
from replay.__main__ import main
from report.__main__ import main as report
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.translating_engine import translating
from tests.jsonoutput import json_of
from tests.replay.conftest import write_key
from tests.replay.traces import request, written
from tests.warmstart import WarmPopen
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.records.schema import Record, RequestId

SESSIONS = shlex.split(
    "--pattern multiturn --turns 3 --rate 40 --number 6 --prefix-count 2 --prefix-tokens 70 --prompt-tokens 20:50"
    " --output-tokens 3:40 --think 0.005s:0.02s --seed 4"
)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A session load on an engine of its own, as a client recorded it."""
    folder = tmp_path_factory.mktemp("capture")
    trace = folder / "captured.jsonl"
    with pytest.MonkeyPatch.context() as patch, ScriptedEngine(seed=1).serving() as engine:
        patch.setenv("KVTAPE_KEY_FILE", str(write_key(folder)))
        assert loadgen(["--url", engine.url, "-o", str(trace), *SESSIONS]) == 0
    return trace.read_bytes()


@pytest.fixture
def captured(capture: bytes, tmp_path: Path) -> Path:
    trace = tmp_path / "captured.jsonl"
    trace.write_bytes(capture)
    return trace


def replay(engine: Any, source: Path, trace: Path, *flags: str) -> int:
    return main([str(source), "--url", engine.url, "-o", str(trace), *flags])


def replay_json(engine: Any, source: Path, trace: Path, *flags: str) -> Any:
    return json_of(main, [str(source), "--url", engine.url, "-o", str(trace), *flags])


def by_id(path: Path) -> dict[RequestId, Record]:
    return {record.request_id: record for record in load_trace(path)[1]}


def cached(path: Path) -> dict[RequestId, int | None]:
    return {request_id: record.cached_tokens for request_id, record in by_id(path).items()}


def hits(path: Path) -> tuple[dict[RequestId, int | None], Counter[int | None]]:
    """Cached tokens by request; first turns' as a whole, as the first to come of those with one prefix finds none."""
    records = by_id(path).values()
    later = {record.request_id: record.cached_tokens for record in records if record.turn != 1}
    return later, Counter(record.cached_tokens for record in records if record.turn == 1)


def test_warm_replay_hits_as_captured(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    out = tmp_path / "replayed.jsonl"
    summary = replay_json(other_engine, captured, out, "--replay-sessions")
    assert hits(out) == hits(captured)
    before, after = by_id(captured), by_id(out)
    for request_id, record in after.items():
        source = before[request_id]
        for name in ("session_id", "parent_id", "turn", "prompt_tokens", "output_tokens", "block_hashes"):
            assert getattr(record, name) == getattr(source, name)
        assert record.output_block_hashes == source.output_block_hashes
        assert record.planned_prompt_tokens == source.prompt_tokens
        assert record.scheduled_ms is not None
        assert (record.think_ms is None) == (source.think_ms is None)
    assert summary["run"]["metrics"] == json_of(report, ["show", str(out)]) | {"cache": None}  # its own pass
    fidelity = summary["fidelity"]
    assert fidelity["prompt_exact"] == fidelity["output_exact"] == 18
    assert fidelity["cached_exact"] == sum(
        cached(out)[request_id] == tokens for request_id, tokens in cached(captured).items()
    )
    assert fidelity["substituted_blocks"] > 0
    assert fidelity["missed_blocks"] == 0
    meta = load_trace(out)[0]
    assert (meta.source, meta.block_size, meta.hash) == ("replay", 16, load_trace(captured)[0].hash)
    assert meta.workload is not None
    assert meta.workload.pattern == "replay-sessions"
    assert meta.workload.source_digest == trace_digest(captured)
    assert meta.workload.nonce


def test_cold_prompts_never_hit(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert replay(other_engine, captured, tmp_path / name, "--replay-sessions", "--cold-prompts") == 0
        assert set(cached(tmp_path / name).values()) == {0}
    hashes = Counter(block for record in by_id(tmp_path / "a").values() for block in record.block_hashes or [])
    assert set(hashes.values()) == {1}
    workload = load_trace(tmp_path / "a")[0].workload
    assert workload is not None
    assert workload.cold_prompts


def test_captured_failures_are_sent_partially(other_engine: Any, tmp_path: Path) -> None:
    records = [
        request("refused", status="error", http_status=429, error="http_429", output_tokens=None),
        request("unreached", status="error", error="connect_refused", output_tokens=None),
        # Three reads, of 1, 1 and 2 tokens, then the client went away.
        request(
            "aborted", status="client_abort", output_tokens=None, ttft_ms=1.0, itl_ms=[1.0, 1.0], itl_tokens=[1, 2]
        ),
        request("queued", status="timeout", output_tokens=None),
        request("embedded", endpoint="/v1/embeddings", output_tokens=None),
        request("answered", endpoint="/v1/messages"),
        # Follows a request that is left out: there is nothing to wait for.
        request("child", parent_id="refused", arrival_ms=30.0),
    ]
    source = written(tmp_path / "s", records)
    assert replay(other_engine, source, tmp_path / "t", "--replay-sessions") == 0
    assert {name: record.output_tokens for name, record in by_id(tmp_path / "t").items()} == {
        "aborted": 4,
        "queued": 1,
        "answered": 2,
        "child": 2,
    }
    assert by_id(tmp_path / "t")[RequestId("child")].scheduled_ms == 30.0


def test_branches_follow_the_parent_and_overlapping_children_the_grandparent(other_engine: Any, tmp_path: Path) -> None:
    records = [
        request("root"),
        request("left", parent_id="root", arrival_ms=15.0),
        request("right", parent_id="root", arrival_ms=25.0, e2e_ms=50.0),
        # It came while its parent was still running, so it had not waited for it.
        request("early", parent_id="right", arrival_ms=45.0),
    ]
    source = written(tmp_path / "s", records)
    assert replay(other_engine, source, tmp_path / "t", "--replay-sessions") == 0
    after = by_id(tmp_path / "t")
    root_end_ms = after[RequestId("root")].end_ms()
    assert root_end_ms is not None
    for name, think_ms in {"left": 10.0, "right": 20.0, "early": 40.0}.items():
        assert after[RequestId(name)].scheduled_ms == pytest.approx(root_end_ms + think_ms, abs=0.01)


def test_trace_and_url_are_the_only_required_arguments(
    captured: Path,
    other_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stem = captured.name.partition(".")[0]
    for name in (f"{stem}-replay.jsonl.zst", f"{stem}-replay-2.jsonl.zst"):
        capsys.readouterr()
        assert main([str(captured), "--url", other_engine.url, "--nonce", "one"]) == 0
        assert len(load_trace(name)[1]) == 18
        out, err = capsys.readouterr()
        assert f"  trace               {name}\n" in out
        assert f" · 18 requests of {captured.name}, hashes of 16-token blocks · replay · nonce one · to {name}\n" in err


def run_command(*command: str | Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "replay", *map(str, command)]
    return WarmPopen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_interrupt_completes_the_trace(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    other_engine.stalls = True
    running = run_command(captured, "--url", other_engine.url, "-o", tmp_path / "t")
    while len(other_engine.seen) < 3:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 130, err
    assert "stopped (SIGINT)" in out
    assert {record.status for record in by_id(tmp_path / "t").values()} == {"client_abort"}


def test_api_auto_uses_the_captured_endpoint(start_sim_server: Any, tmp_path: Path) -> None:
    endpoints = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", None)
    shape: dict[str, Any] = {"prompt_tokens": 90, "output_tokens": 4, "block_hashes": [1, 2, 3, 4, 5]}
    records = [request(f"r{at}", endpoint=endpoint, **shape) for at, endpoint in enumerate(endpoints)]
    source = written(tmp_path / "s", records, block_size=16)
    with start_sim_server("--speed", "max", "--block-size", "16") as server, translating(server) as url:
        flags = ["--api", "auto", "--closed-loop", "--parallel", "1"]
        assert main([str(source), "--url", url, "-o", str(tmp_path / "t"), *flags]) == 0
    after = [by_id(tmp_path / "t")[RequestId(f"r{at}")] for at in range(len(endpoints))]
    assert [record.endpoint for record in after] == [endpoint or "/v1/completions" for endpoint in endpoints]
    assert {record.status for record in after} == {"ok"}
    # Words keep their tokens' places, so that a prompt is as long in each of them, and shares what it shared.
    assert {record.prompt_tokens for record in after} == {90}
    cached = [record.cached_tokens for record in after]
    assert cached[:2] == [0, 0]
    assert cached[4] == 80
    assert cached[2] == cached[3] == 80
