"""The main job over real sockets: capture through the tap, replay warm and cold, fit, predict, report.

The same test runs against the embedded engine and, marked vllm, against a real one (``KVTAPE_VLLM``).
"""

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import running_tap
from tests.warmstart import run_warm
from tracefile.files.reading import load_trace
from tracefile.records.schema import Record

CALIBRATION = "--pattern multiturn --turns 2 --rate 3 --number 24 --seed 5 --prompt-tokens 64:900 --output-tokens 4:12"
SESSIONS = (
    "--pattern multiturn --turns 3 --rate 2 --number 12 --seed 6 --prefix-count 2 --prefix-tokens 1000"
    " --prompt-tokens 40:120 --output-tokens 40:70 --think 0.05s:0.2s"
)


@dataclass(frozen=True)
class Job:
    """Commands run in one directory against one engine, with a key file of the test's own."""

    directory: Path
    engine_url: str

    def environment(self) -> dict[str, str]:
        return os.environ | {"KVTAPE_KEY_FILE": str(self.directory / "key")}

    def run(self, *command: str | Path) -> str:
        """Run one command to a clean end and return what it printed."""
        result = run_warm(*command, env=self.environment())
        assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def capture(self, name: str, load: str) -> Path:
        trace = self.directory / f"{name}.jsonl.zst"
        httpx.post(f"{self.engine_url}/reset_prefix_cache", timeout=30).raise_for_status()
        with running_tap(self.engine_url, trace, "--tokenizer", "ids") as url:
            self.run("loadgen", "--url", url, "-o", self.directory / f"{name}-client.jsonl", *load.split())
        return trace


@pytest.fixture(params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sim":
        return str(request.getfixturevalue("sim_server"))
    url = os.environ.get("KVTAPE_VLLM")
    if url is None:
        pytest.skip("KVTAPE_VLLM names no running vLLM; `make test-vllm` starts one")
    return url


def records_of(path: Path) -> dict[str, Record]:
    return {record.request_id: record for record in load_trace(path)[1]}


def check_never_judged_by_what_it_was_fitted_on(calibration: Path, model: Path, tmp_path: Path) -> None:
    refused = run_warm("sim", "run", calibration, "--latency-model", model, "-o", tmp_path / "never.jsonl")
    assert refused.returncode == 2
    assert "fitted" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "never.jsonl").exists()


@pytest.mark.timeout(420)
def test_capture_replay_fit_predict_report(tmp_path: Path, engine_url: str) -> None:
    job = Job(tmp_path, engine_url)
    calibration = job.capture("calibration", CALIBRATION)
    captured_path = job.capture("captured", SESSIONS)
    captured = records_of(captured_path)

    # The tap saw every request of the load: 12 sessions of 3 turns, linked, hashed, none failed.
    assert len(captured) == 36
    assert {record.status for record in captured.values()} == {"ok"}
    assert {record.turn for record in captured.values()} == {1, 2, 3}
    assert all(record.block_hashes and record.output_block_hashes is not None for record in captured.values())
    # Turn 2 re-sends turn 1 and its answer, so the engine must have found all of turn 1's blocks.
    assert all(
        record.cached_tokens and record.cached_tokens >= 1000 for record in captured.values() if record.turn != 1
    )
    # The client's own trace tells of the same requests under the same ids.
    client = records_of(tmp_path / "captured-client.jsonl")
    assert client.keys() == captured.keys()
    assert {id_: record.prompt_tokens for id_, record in client.items()} == {
        id_: record.prompt_tokens for id_, record in captured.items()
    }

    replayed_path, cold_path = tmp_path / "replayed.jsonl", tmp_path / "cold.jsonl"
    replay = ["replay", str(captured_path), "--url", engine_url, "--replay-sessions"]
    job.run(*replay, "--reset-cache", "-o", replayed_path)
    job.run(*replay, "--cold-prompts", "-o", cold_path)
    replayed, cold = records_of(replayed_path), records_of(cold_path)
    assert replayed.keys() == captured.keys() == cold.keys()
    # Warm: the same tokens shared in the same way hit the same blocks, first turns aside, whose hits depend on which
    # of two sessions with one prefix was scheduled first.
    later = [id_ for id_, record in captured.items() if record.turn != 1]
    assert {id_: replayed[id_].cached_tokens for id_ in later} == {id_: captured[id_].cached_tokens for id_ in later}
    assert {record.cached_tokens for record in cold.values()} == {0}

    model = tmp_path / "model.json"
    job.run("sim", "calibrate", calibration, "--max-num-seqs", "32", "--max-num-batched-tokens", "2048", "-o", model)
    predicted_path = tmp_path / "predicted.jsonl"
    job.run("sim", "run", captured_path, "--latency-model", model, "--replay-sessions", "-o", predicted_path)
    predicted = records_of(predicted_path)
    assert {id_: predicted[id_].cached_tokens for id_ in later} == {id_: captured[id_].cached_tokens for id_ in later}

    check_never_judged_by_what_it_was_fitted_on(calibration, model, tmp_path)

    page = tmp_path / "report.html"
    labelled = [f"captured={captured_path}", f"replayed={replayed_path}", f"predicted={predicted_path}"]
    compared = job.run("report", "compare", *labelled, "--html", page, "--json")
    assert "plotly" in page.read_text().lower()
    assert json.loads(compared)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_chat_text_is_tokenized_as_vllm_does_and_never_written(tmp_path: Path) -> None:
    url, tokenizer = os.environ.get("KVTAPE_VLLM"), os.environ.get("KVTAPE_VLLM_MODEL")
    if url is None or tokenizer is None:
        pytest.skip("KVTAPE_VLLM or KVTAPE_VLLM_MODEL is not set; `make test-vllm` sets both")
    trace = tmp_path / "chat.jsonl"
    messages = [{"role": "system", "content": "canary-system-prompt " * 60}]
    with (
        running_tap(url, trace, "--tokenizer", tokenizer) as tap_url,
        httpx.Client(base_url=tap_url, timeout=60) as client,
    ):
        for question in ("canary-question one?", "canary-question two?", "canary-question three?"):
            messages.append({"role": "user", "content": question})
            body = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            messages.append(answer["choices"][0]["message"] | {"role": "assistant"})
    records = load_trace(trace)[1]
    assert [record.hash_source for record in records] == ["tokenizer"] * 3
    # The tap's ids are as many as the engine counted, so that the chain covers every full block ...
    assert [record.prompt_tokens_by_tokenizer for record in records] == [None] * 3
    assert [len(record.block_hashes or []) for record in records] == [
        (record.prompt_tokens or 0) // 16 for record in records
    ]
    # ... and what the chain says two prompts share, the engine (32-token blocks) found in its cache.
    for earlier, later in pairwise(records):
        shared = sum(a == b for a, b in zip(earlier.block_hashes or [], later.block_hashes or [], strict=False))
        assert shared > 0
        assert later.cached_tokens is not None
        assert later.cached_tokens >= shared * 16 // 32 * 32
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert trace in written
    assert not [path for path in written if b"canary" in path.read_bytes()]
