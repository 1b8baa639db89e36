"""``loadgen`` as a user runs it, against a scripted engine over a real socket."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from tests.warmstart import WarmPopen
from tracefile.files.reading import load_trace
from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.hashing.hashkey import load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

SESSIONS = shlex.split(
    "--pattern multiturn --turns 3 --rate 50 --number 6 --prefix-count 2 --prefix-tokens 70 --prompt-tokens 20:50"
    " --output-tokens 3:40 --think 0.001s:0.01s --seed 4"
)


def load(engine: Any, trace: Path, flags: Sequence[str]) -> int:
    return main(["--url", engine.url, "-o", str(trace), *flags])


def turns_of(records: Sequence[Record], session: str | None) -> list[Record]:
    return sorted((record for record in records if record.session_id == session), key=lambda record: record.turn or 0)


def test_sessions_continue_from_real_outputs(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl.zst"
    assert load(engine, trace, SESSIONS) == 0
    meta, records = load_trace(trace)
    assert (meta.source, meta.model, meta.block_size, meta.tokenizer) == ("client", "scripted", 16, "ids")
    assert meta.engine is not None
    assert (meta.engine.version, meta.engine.num_gpu_blocks) == ("9.9", 512)
    assert len(records) == 18
    assert {record.status for record in records} == {"ok"}
    # Every context is the one before, the generated ids, and at least 20 new ones.
    by_id = {headers["x-request-id"]: body for headers, body in zip(engine.headers, engine.seen, strict=True)}
    for name, body in by_id.items():
        stem, _, turn = name.rpartition("-")
        if (following := by_id.get(f"{stem}-{int(turn) + 1}")) is not None:
            assert following["prompt"][: len(body["prompt"])] == body["prompt"]
            grown = len(following["prompt"]) - len(body["prompt"])
            assert 20 + body["max_tokens"] <= grown <= 50 + body["max_tokens"]
    assert all(body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] for body in engine.seen)


def test_trace_records_prefix_hits(engine: Any, tmp_path: Path) -> None:
    """Real answers fed back: decode-filled blocks are hit, and the trace's hashes say exactly which."""
    trace = tmp_path / "t.jsonl"
    assert load(engine, trace, SESSIONS) == 0
    _, records = load_trace(trace)
    known: set[int] = set()
    timeline = [(record.arrival_ms or 0.0, 1, record) for record in records]
    timeline += [(record.end_ms() or 0.0, 0, record) for record in records]
    for _, arrives, record in sorted(timeline, key=lambda item: item[:2]):
        if arrives:
            hashes = record.block_hashes or []
            usable = hashes[: ((record.prompt_tokens or 0) - 1) // 16]
            hits = next((i for i, block_hash in enumerate(usable) if block_hash not in known), len(usable))
            # First turns aside: of two that come at once, which one the engine takes first is its own to say.
            assert record.turn == 1 or record.cached_tokens == hits * 16
            known.update(hashes)
        else:
            known.update(record.output_block_hashes or [])
    assert any((record.cached_tokens or 0) > 70 + 50 + 16 for record in records)
    # Two prefixes of four full blocks: the first turn on each misses, every other one hits.
    assert {record.cached_tokens for record in records if record.turn == 1} == {0, 64}


def test_hashes_and_ids_equal_a_tap_with_the_same_key(engine: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    assert load(engine, trace, SESSIONS) == 0
    _, records = load_trace(trace)
    hasher = BlockHasher(load_key(), model="scripted")
    by_id = {record.request_id: record for record in records}
    for headers, body in zip(engine.headers, engine.seen, strict=True):
        record = by_id[keyed_id(load_key(), "request", headers["x-request-id"])]  # type: ignore[index]
        assert record.session_id == keyed_id(load_key(), "session", headers["x-session-id"])
        assert record.block_hashes == hasher.hash_blocks(body["prompt"])
    for record in records:
        turns = turns_of(records, record.session_id)
        for turn, following in pairwise(turns):
            assert following.parent_id == turn.request_id
            chain = [*(turn.block_hashes or []), *(turn.output_block_hashes or [])]
            assert (following.block_hashes or [])[: len(chain)] == chain
            assert len(chain) == ((turn.prompt_tokens or 0) + (turn.output_tokens or 0) - 1) // 16


def test_replacement_tokens_without_token_ids(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.returns_ids = False
    assert load(engine, tmp_path / "t", SESSIONS) == 0
    assert "returned no token ids for 18 outputs" in capsys.readouterr().out
    _, records = load_trace(tmp_path / "t")
    assert all(record.output_block_hashes is None for record in records)
    assert {record.turn for record in records} == {1, 2, 3}


def test_url_is_the_only_required_flag(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    engine.running, engine.waiting, engine.has_reset, engine.reports_cached = 2, 1, False, False
    assert main(["--url", engine.url, "--number", "4"]) == 0
    out, err = capsys.readouterr()
    started, busy, *warnings = err.splitlines()
    assert started.startswith(f"loadgen: {engine.url} · model scripted · vllm 9.9 ")
    assert "not idle: 2 requests running, 1 waiting" in busy
    # The first responses tell what no call before them could.
    assert warnings == [
        "warning: the engine reports no cached tokens: hits stay unknown; start vllm with "
        "--enable-prompt-tokens-details"
    ]
    assert out.startswith("done: 4 of 4 requests ok in ")
    assert "  trace               loadgen.jsonl.zst\n" in out
    meta, records = load_trace("loadgen.jsonl.zst")
    assert (len(records), meta.workload and meta.workload.pattern) == (4, "closed loop")


def test_missed_slo_sets_the_exit_code_after_the_summary(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--rate", "100", "--number", "3", "--gpus", "2"]
    kept = ["--slo", "ttft.p99<=1h", "--slo", "completion_tps.steady_per_gpu>0"]
    assert load(engine, tmp_path / "t", [*few, *kept]) == 0
    engine_facts = load_trace(tmp_path / "t")[0].engine
    assert engine_facts is not None
    assert engine_facts.gpus == 2
    assert load(engine, tmp_path / "u", [*few, "--slo", "ttft.p99<=0.001ms"]) == 1
    assert "SLO MISSED: ttft.p99<=0.001ms" in capsys.readouterr().out
    with pytest.raises(InputError, match="no metric 'ttfx'"):
        load(engine, tmp_path / "v", [*few, "--slo", "ttfx.p99<=1s"])
    assert not (tmp_path / "v").exists()
    with pytest.raises(InputError, match="needs streams; expected no --no-stream, or a limit on e2e"):
        load(engine, tmp_path / "w", [*few, "--no-stream", "--slo", "ttft.p99<=1s"])
    assert not (tmp_path / "w").exists()
    with pytest.raises(InputError, match=r"x has no request in turns2\+; expected one of all"):
        load(engine, tmp_path / "x", [*few, "--slo", "turns2+.ttft.p99<=1s"])
    assert "E2E ms" in capsys.readouterr().out


def test_fully_rejected_run_prints_the_engines_reason(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.context, engine.prints = 100, "of 9000 tokens"
    command = ["--rate", "100", "--number", "2", "--prompt-tokens"]
    assert load(engine, tmp_path / "t.jsonl", [*command, "9000"]) == 1
    out, err = capsys.readouterr()
    assert "the engine refuses: as the script says of 9000 tokens\n" in err
    assert "  errors              2 http_400\n" in out
    assert "  trace               none: no request was answered\n" in out
    assert len(out.splitlines()) < 10
    assert os.listdir(tmp_path) == ["key"]
    assert load(engine, tmp_path / "t.jsonl", [*command, "50"]) == 0


def run_command(engine_url: str, trace: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "loadgen", "--url", engine_url, "-o", str(trace), *flags]
    return WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_completes_the_trace(engine: Any, tmp_path: Path, number: signal.Signals) -> None:
    engine.stalls = True
    trace = tmp_path / "t.jsonl"
    running = run_command(engine.url, trace, "--rate", "50", "--number", "1000")
    while len(engine.seen) < 5:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 130, err
    assert f"stopped ({number.name})" in out
    assert "Traceback" not in err
    _, records = load_trace(trace)
    assert len(records) == len(engine.seen) >= 5
    assert {record.status for record in records} == {"client_abort"}
