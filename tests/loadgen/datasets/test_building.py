"""``loadgen build-dataset``: sessions cut once are the sessions that a run would cut."""

import json
from pathlib import Path

import pytest

from loadgen.__main__ import main
from loadgen.core.lengths import LengthDistribution
from loadgen.datasets.session import ESTIMATED, DatasetOptions
from loadgen.datasets.swesmith import read_swe_smith
from tracefile import InputError, Meta, Record, RequestId, SessionId, TraceWriter, load_trace

LENGTHS = ["--first-turn-length", "20", "--subsequent-turn-length", "5:9", "--min-turns", "2", "--max-turns", "4"]


def trajectories(path: Path, count: int) -> Path:
    def messages(number: int) -> list[dict[str, str]]:
        texts = [f"trajectory {number} message {place} " + "words " * 12 for place in range(4 + number % 3)]
        return [{"role": "user" if place == 0 else "tool", "content": text} for place, text in enumerate(texts)]

    path.write_text("".join(json.dumps({"messages": messages(number)}) + "\n" for number in range(count)))
    return path


def build(*argv: str | Path) -> int:
    return main(["build-dataset", *map(str, argv)])


def test_a_built_file_holds_the_sessions_that_a_run_would_cut(tmp_path: Path) -> None:
    source, out = trajectories(tmp_path / "t.jsonl", 20), tmp_path / "built.json"
    assert build(f"swe-smith:{source}", "-o", out, "--number", "6", "--seed", "3", *LENGTHS) == 0
    options = DatasetOptions(
        lengths=ESTIMATED,
        counts_outputs=False,
        seed=3,
        min_turns=2,
        max_turns=4,
        first_turn_tokens=LengthDistribution(20, 20),
        subsequent_turn_tokens=LengthDistribution(5, 9),
    )
    wanted = list(read_swe_smith(source, options))[:6]
    assert list(read_swe_smith(out, DatasetOptions(lengths=ESTIMATED))) == wanted
    assert all(2 <= len(session) <= 4 for session in wanted)
    assert set(json.loads(out.read_text())) == {"conversations"}


def test_workers_change_nothing(tmp_path: Path) -> None:
    source = trajectories(tmp_path / "t.jsonl", 40)
    for workers in ("1", "2"):
        build(f"swe-smith:{source}", "-o", tmp_path / workers, "--number", "30", "--workers", workers, *LENGTHS)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_captured_trace_becomes_rows_of_a_trie_workload(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Meta()) as writer:
        first = Record(request_id=RequestId("a"), session_id=SessionId("s"), arrival_ms=0.0, prompt_tokens=30)
        first.output_tokens = 10
        writer.write(first)
        later = Record(request_id=RequestId("b"), session_id=SessionId("s"), arrival_ms=900.0, prompt_tokens=55)
        later.output_tokens, later.parent_id, later.think_ms = 7, RequestId("a"), 250.0
        writer.write(later)
    assert build(f"trace:{tmp_path / 't'}", "-o", tmp_path / "rows.jsonl") == 0
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {
        "input_prompt_length": 30,
        "num_turns": 1,
        "assistant_response_length": [10],
        "tool_call_output_length": [15],
        "tool_call_latency": [0.25],
        "final_assistant_response_length": 7,
    }
    assert [record.prompt_tokens for record in load_trace(tmp_path / "rows.jsonl")[1]] == [30, 55]


def test_a_file_with_too_few_sessions_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source, out = trajectories(tmp_path / "t.jsonl", 3), tmp_path / "built.json"
    with pytest.raises(InputError, match=r"t\.jsonl: \d sessions of that length; expected 9, or a smaller --number"):
        build(f"swe-smith:{source}", "-o", out, "--number", "9", *LENGTHS)
    assert not out.exists()


def test_what_cannot_be_built(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('[{"role": "user", "content": "hello"}]\n')
    with pytest.raises(InputError, match="random: drawn by its flags at every run; expected a dataset with a file"):
        build("random", "-o", tmp_path / "o")
    with pytest.raises(InputError, match="messages: texts are read as they are; expected swe-smith"):
        build(f"messages:{chats}", "-o", tmp_path / "o")
    with pytest.raises(InputError, match="--workers 0; expected 1 or more"):
        build(f"swe-smith:{chats}", "-o", tmp_path / "o", "--workers", "0")
