"""A trace in columns is the trace in lines, to every command that reads one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.capture import load_requests
from replay.survey import Selection, survey_trace
from report.__main__ import main as report
from sim.__main__ import main as sim
from sim.latency.modelfile import default_model, save_model
from tracefile import BlockHash, Meta, Record, RequestId, SessionId, TraceWriter
from tracefile.__main__ import main as tracefile

BLOCK_SIZE = 32


def conversations() -> list[Record]:
    """60 sessions of two turns on three prefixes: answers streamed, some cut short, two refused."""
    records, unused = [], 1_000
    for number in range(60):
        chain = [BlockHash(1 + 100 * (number % 3) + block) for block in range(20 + 5 * (number % 5))]
        parent = None
        for turn in (1, 2):
            prompt = len(chain) * BLOCK_SIZE + 7 * turn
            output = 8 + number % 40
            blocks = (prompt + output - 1) // BLOCK_SIZE
            answer = [BlockHash(unused + block) for block in range(blocks - len(chain))]
            unused += len(answer)
            refused = turn == 2 and number in {7, 31}
            name = RequestId(f"r{number}-{turn}")
            records.append(
                Record(
                    request_id=name,
                    session_id=SessionId(f"s{number}"),
                    parent_id=parent,
                    turn=turn,
                    arrival_ms=900.0 * number + 4_000.0 * (turn - 1),
                    think_ms=500.0 if turn == 2 else None,
                    ttft_ms=None if refused else 20.0 + 0.03 * len(chain) * (1 if turn == 1 else 0.3) * BLOCK_SIZE,
                    itl_ms=[] if refused else [8.0 + 0.01 * (number % 7)] * (output - 1),
                    itl_tokens=[] if refused else [1] * (output - 1),
                    e2e_ms=3.0 if refused else 400.0 + 8.0 * output,
                    status="error" if refused else "client_abort" if number % 11 == 5 else "ok",
                    http_status=429 if refused else 200,
                    stream=True,
                    max_tokens=output,
                    prompt_tokens=prompt,
                    output_tokens=None if refused else output,
                    cached_tokens=None if refused else 0 if turn == 1 else (len(chain) // 2) * BLOCK_SIZE,
                    block_hashes=list(chain),
                    output_block_hashes=None if refused else answer,
                )
            )
            chain, parent = chain + answer, name
    return sorted(records, key=lambda record: (record.arrival_ms or 0.0) + (record.e2e_ms or 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("columns")
    with TraceWriter(folder / "t.jsonl", Meta(source="tap", model="m", block_size=BLOCK_SIZE)) as writer:
        for record in conversations():
            writer.write(record)
    assert tracefile(["convert", str(folder / "t.jsonl"), str(folder / "t.parquet")]) == 0
    save_model(default_model(), folder / "model.json")
    return folder


def said(capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int], *arguments: str) -> str:
    """What a command that succeeds prints, without the name of the file that it read."""
    capsys.readouterr()
    assert command([*arguments]) == 0
    return capsys.readouterr().out.replace("t.parquet", "TRACE").replace("t.jsonl", "TRACE")


@pytest.mark.parametrize(
    "question",
    [
        ("pool", "--num-gpu-blocks", "201", "--json"),
        ("pool", "--engine", "sglang", "--num-gpu-blocks", "201", "--json"),
        ("curve", "--window", "60s", "--json"),
        ("misses", "--num-gpu-blocks", "201", "--json"),
        ("what-if", "--latency-model", "model.json", "--num-gpu-blocks", "300,600", "--members", "3", "--json"),
    ],
    ids=" ".join,
)
def test_sims_answers_are_the_same(
    folder: Path, question: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command, *flags = question
    lines, columns = (said(capsys, sim, command, f"t.{form}", *flags) for form in ("jsonl", "parquet"))
    assert json.loads(lines) == json.loads(columns)


def test_the_fit_is_the_same(folder: Path) -> None:
    models = []
    for form in ("jsonl", "parquet"):
        out = folder / f"{form}.json"
        step = ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048")
        flags = (*step, "--num-gpu-blocks", "4096", "--bootstrap", "20")
        assert sim(["calibrate", str(folder / f"t.{form}"), "-o", str(out), *flags, "--no-async-scheduling"]) == 0
        models.append(json.loads(out.read_text()))
    assert models[0]["fitted_on"][0].pop("name") == "t.jsonl"
    assert models[1]["fitted_on"][0].pop("name") == "t.parquet"
    assert models[0] == models[1], "the digest is of the records, whatever form they have"


def test_a_report_finds_no_difference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = (f"captured={folder / 't.jsonl'}", f"again={folder / 't.parquet'}")
    assert report(["compare", *labels, "--json", "--bootstrap", "0"]) == 0
    compared: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert compared["pairs"]["again"]["joined"] == 120
    assert compared["pairs"]["again"]["cohorts"]["all"]["ttft"]["p50"]["error"] == 0.0
    assert compared["pairs"]["again"]["cohorts"]["all"]["cached"]["exact_share"] == 1.0


@pytest.mark.parametrize("selection", [Selection(), Selection(limit=20)], ids=["all", "limited"])
def test_a_replay_sends_the_same(folder: Path, selection: Selection) -> None:
    lines, columns = (
        load_requests(survey_trace(folder / f"t.{form}", selection), selection, sessions=True)
        for form in ("jsonl", "parquet")
    )
    assert len(lines) == (20 if selection.limit else 118)
    assert lines == columns
