"""``replay`` as a user runs it, against scripted engines over real sockets."""

import json
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
from replay.__main__ import main, stem_of
from report.__main__ import main as report
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.translating_engine import translating
from tests.jsonoutput import json_of
from tests.loadgen.runs.test_resumption import recorded
from tests.replay.conftest import write_key
from tests.replay.traces import request, written
from tests.warmstart import WarmPopen
from tracefile import InputError, Record, RequestId, load_trace, trace_digest

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


def test_a_warm_replay_hits_what_the_capture_hit(captured: Path, other_engine: Any, tmp_path: Path) -> None:
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


def test_a_replay_can_be_replayed(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    assert replay(other_engine, captured, once, "--replay-sessions") == 0
    other_engine.cache.clear()
    assert replay(other_engine, once, twice, "--replay-sessions") == 0
    assert hits(twice) == hits(captured)


def test_without_ids_decode_filled_blocks_are_missed_and_it_is_said(
    captured: Path, other_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_engine.returns_ids = False
    out = tmp_path / "out.jsonl"
    assert replay(other_engine, captured, out, "--replay-sessions") == 0
    filled = sum(bool(record.output_block_hashes) for record in by_id(captured).values())
    assert f"the engine returned no token ids for {filled} answers" in capsys.readouterr().out
    later, captured_later = hits(out)[0], hits(captured)[0]
    fewer = [(later[request_id] or 0) - (tokens or 0) for request_id, tokens in captured_later.items()]
    assert max(fewer) == 0 > min(fewer)


def test_cold_prompts_hit_nothing_twice_in_a_row(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert replay(other_engine, captured, tmp_path / name, "--replay-sessions", "--cold-prompts") == 0
        assert set(cached(tmp_path / name).values()) == {0}
    hashes = Counter(block for record in by_id(tmp_path / "a").values() for block in record.block_hashes or [])
    assert set(hashes.values()) == {1}
    workload = load_trace(tmp_path / "a")[0].workload
    assert workload is not None
    assert workload.cold_prompts


def test_cold_prompts_that_hit_are_told(
    captured: Path, other_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):  # the same nonce: the second run is the first one again
        assert replay(other_engine, captured, tmp_path / name, "--cold-prompts", "--nonce", "same") == 0
    out = capsys.readouterr().out
    assert "  cold: 18 of 18 requests hit nothing\n" in out
    assert "  cold: 0 of 18 requests hit nothing\n" in out
    assert "not cold: 18 requests of 18 hit" in out


def test_open_loop_keeps_the_recorded_times(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    assert replay(other_engine, captured, tmp_path / "a", "--speedup", "2") == 0
    before, after = by_id(captured), by_id(tmp_path / "a")
    first = min(record.arrival_ms or 0.0 for record in before.values())
    for request_id, record in after.items():
        assert record.scheduled_ms == pytest.approx(((before[request_id].arrival_ms or 0.0) - first) / 2, abs=0.01)
    assert min(record.scheduled_ms or 0.0 for record in after.values()) == 0.0


def test_reset_cache_resets_and_looks(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    assert replay(other_engine, captured, tmp_path / "a", "--nonce", "n", "--replay-sessions") == 0
    assert replay(other_engine, captured, tmp_path / "b", "--nonce", "n", "--replay-sessions", "--reset-cache") == 0
    assert hits(tmp_path / "b") == hits(tmp_path / "a") == hits(captured)


def test_failures_of_the_capture_are_sent_as_far_as_they_went(other_engine: Any, tmp_path: Path) -> None:
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


def test_branches_leave_after_their_parent_and_an_overlapping_child_after_its_grandparent(
    other_engine: Any, tmp_path: Path
) -> None:
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


def test_a_failed_turn_ends_its_session_and_what_is_not_sent_is_counted(
    captured: Path, other_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_engine.statuses = {0: 503}
    assert replay(other_engine, captured, tmp_path / "t", "--replay-sessions") == 0
    assert "not sent            2 after http_503" in capsys.readouterr().out
    assert len(by_id(tmp_path / "t")) == 16


def test_a_bad_trace_is_refused_before_anything_is_sent(other_engine: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "s", [request("a", prompt_tokens=7)])
    with pytest.raises(InputError, match=":2: block_hashes: 2; expected at most"):
        replay(other_engine, source, tmp_path / "t", "--replay-sessions")
    assert other_engine.paths == []


def test_a_trace_and_a_url_are_enough(
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
        assert main([str(captured), "--url", other_engine.url, "--limit", "2", "--nonce", "one"]) == 0
        assert len(load_trace(name)[1]) == 2
        out, err = capsys.readouterr()
        assert f"  trace               {name}\n" in out
        assert f" · 2 requests of {captured.name}, hashes of 16-token blocks · replay · nonce one · to {name}\n" in err
    with pytest.raises(InputError, match="--resume: without --output; expected the trace to go on with"):
        main([str(captured), "--url", other_engine.url, "--resume"])


@pytest.mark.parametrize(
    ("source", "stem"),
    [
        ("monday.jsonl.zst", "monday"),
        ("a/b/v1.2.jsonl.gz", "v1.2"),
        ("BurstGPT_1.csv", "BurstGPT_1"),
        ("/var/lib/kvtape", "kvtape"),
    ],
)
def test_a_replay_is_named_after_its_trace(source: str, stem: str) -> None:
    assert stem_of(Path(source)) == stem


def test_without_hashes_only_a_cold_replay_is_honest(other_engine: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "s", [request("a", block_hashes=None)], block_size=None)
    with pytest.raises(InputError, match="or --cold-prompts to share nothing"):
        replay(other_engine, source, tmp_path / "t")
    with pytest.raises(InputError, match="for --replay-sessions"):
        replay(other_engine, source, tmp_path / "t", "--replay-sessions")
    assert replay(other_engine, source, tmp_path / "t", "--cold-prompts") == 0
    assert [len(body["prompt"]) for body in other_engine.seen] == [9]


def run_command(*command: str | Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "replay", *map(str, command)]
    return WarmPopen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_an_interrupt_keeps_what_was_done(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    other_engine.stalls = True
    running = run_command(captured, "--url", other_engine.url, "-o", tmp_path / "t")
    while len(other_engine.seen) < 3:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 130, err
    assert "cut short (SIGINT)" in out
    assert {record.status for record in by_id(tmp_path / "t").values()} == {"client_abort"}


@pytest.mark.parametrize("source", ["missing.jsonl", "not-a-trace"])
def test_bad_input_is_one_line_and_2(tmp_path: Path, source: str) -> None:
    (tmp_path / "not-a-trace").write_text("hello\n")
    running = run_command(tmp_path / source, "--url", "http://127.0.0.1:1", "-o", tmp_path / "t")
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("replay: error: ")
    assert source in err


def test_prompts_beyond_the_engines_length_are_refused_with_it(start_sim_server: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "s", [request(f"r{at}", prompt_tokens=90, block_hashes=[1]) for at in range(3)], 16)
    with start_sim_server("--speed", "max", "--max-model-len", "64") as url:
        expected = r"^\S+/s: the engine refuses .* of 64 tokens, prompt and output together \(max_model_len\)$"
        with pytest.raises(InputError, match=expected):
            main([str(source), "--url", url, "-o", str(tmp_path / "t")])


def test_each_request_can_go_where_it_was_captured(start_sim_server: Any, tmp_path: Path) -> None:
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


def test_several_processes_send_one_load(captured: Path, other_engine: Any, tmp_path: Path) -> None:
    summaries, prompts = [], []
    for count in ("1", "3"):
        other_engine.seen.clear()
        other_engine.cache.clear()
        flags = ["--replay-sessions", "--nonce", "n", "--procs", count]
        summaries.append(replay_json(other_engine, captured, tmp_path / f"by-{count}", *flags))
        prompts.append(Counter(tuple(body["prompt"][:64]) for body in other_engine.seen))
    one, three = summaries
    assert one["run"]["digest"] == three["run"]["digest"]
    assert prompts[0] == prompts[1]
    assert (
        one["account"] == three["account"] == {"requests": 18, "sent": 18, "earlier": 0, "left_out": {}, "not_sent": {}}
    )
    assert one["fidelity"] == three["fidelity"] | {"cached_exact": one["fidelity"]["cached_exact"]}
    assert set(by_id(tmp_path / "by-3")) == set(by_id(captured))


def test_a_run_that_was_cut_short_goes_on_under_its_own_nonce(
    captured: Path, other_engine: Any, tmp_path: Path
) -> None:
    other_engine.stalls_from = 6
    running = run_command(captured, "--url", other_engine.url, "-o", tmp_path / "t", "--json")
    while len(other_engine.seen) < 8 or not recorded(tmp_path / "t"):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=20)
    cut = json.loads(out)["account"]
    assert cut["sent"] + sum(cut["not_sent"].values()) == 18
    done = {request_id for request_id, record in by_id(tmp_path / "t").items() if record.status == "ok"}
    other_engine.stalls_from = float("inf")
    account = replay_json(other_engine, captured, tmp_path / "t", "--resume")["account"]
    assert account["earlier"] == len(done) > 0
    assert account["sent"] == 18 - len(done)
    assert {record.status for record in by_id(tmp_path / "t").values()} == {"ok"}
    assert len(by_id(tmp_path / "t")) == 18
