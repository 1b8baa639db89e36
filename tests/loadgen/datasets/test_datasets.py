"""Datasets: a few rows of each format as its users write it, the sessions they make, and bad rows by name."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.core.lengths import LengthDistribution
from loadgen.datasets import DATASETS
from loadgen.datasets.session import DatasetSession, estimated_tokens
from loadgen.plan.config import LoadConfig
from loadgen.plan.shapes import SessionShape
from loadgen.plan.workload import Workload
from tracefile.records.errors import InputError

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "a" * 40},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "x", "content": "found"},
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(name: str, path: Path) -> list[DatasetSession]:
    return list(DATASETS[name].read(path, estimated_tokens))


def messages_of(session: DatasetSession) -> list[list[tuple[str, str]]]:
    return [[(quoted.role, quoted.text) for quoted in turn.quoted] for turn in session]


def test_messages_have_a_turn_per_assistant_message(tmp_path: Path) -> None:
    text = {"instance_id": "i", "messages": json.dumps(CHAT)}  # as SWE-smith's trajectories are
    for row in (
        CHAT,
        text,
        {"messages": CHAT, "tools": []},
        {"custom_id": "1", "body": {"model": "m", "messages": CHAT}},
    ):
        (session,) = read("messages", write(tmp_path / "t", row))
        assert messages_of(session) == [
            [("system", "be brief"), ("user", "one")],
            [("user", "two")],
            [("user", "found")],  # the model's real answer made no call that a tool's message could belong to
        ]
        # 40 letters at four a token; look{} is six letters.
        assert [turn.output_tokens for turn in session] == [10, 2, None]


def test_sharegpt_as_an_array(tmp_path: Path) -> None:
    conversation = [
        {"from": "gpt", "value": "an answer before anything was said"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "b" * 8},
        {"from": "human", "value": "more"},
    ]
    (tmp_path / "t").write_text(
        json.dumps([{"id": "a", "conversations": conversation}, {"id": "b", "conversations": []}])
    )
    first, second = read("sharegpt", tmp_path / "t")
    assert messages_of(first) == [[("user", "hi")], [("user", "more")]]
    assert [turn.output_tokens for turn in first] == [2, None]
    assert second == []


def request(name: str, arrival_ms: float, prompt_tokens: int, **more: Any) -> dict[str, Any]:
    """Line of a trace."""
    return {"request_id": name, "arrival_ms": arrival_ms, "prompt_tokens": prompt_tokens} | more


def test_new_tokens_of_a_trace_turn(tmp_path: Path) -> None:
    first = request("a", 1, 100, output_tokens=30)
    later = request("b", 9, 170, output_tokens=30, parent_id="a", think_ms=500)
    branch = request("c", 10, 180, output_tokens=30, parent_id="a")
    path = write(tmp_path / "t", {"meta": {"schema": "kvtape/1"}}, first, later, branch)
    session, other = read("trace", path)
    assert [(turn.new_tokens, turn.output_tokens, turn.think_ms) for turn in session] == [(100, 30, 0), (40, 30, 500)]
    # The first to go on from a request goes on; another begins a session with all its prompt.
    assert [turn.new_tokens for turn in other] == [180]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("messages", {"messages": []}, ":1: messages: no messages"),
        ("messages", {"messages": [{"content": "x"}]}, ":1: messages: message 1: .*role"),
        ("sharegpt", {"conversations": [{"from": "martian", "value": "x"}]}, ":1: .*message 1: from: 'martian'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, row: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(name, write(tmp_path / "t", row))


# A dataset as a load.

LOAD = LoadConfig(
    url="http://x", trace=Path("t"), parallel=2, number=7, dataset="trace", dataset_path=Path("d"), seed=3
)


def load(path: Path, **changes: Any) -> list[SessionShape]:
    return list(Workload(replace(LOAD, dataset_path=path, **changes)))


def firsts(sessions: Sequence[SessionShape]) -> list[int]:
    return [session.turns[0].prompt_tokens for session in sessions]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Sessions whose first prompts are 1, 2 and 3 tokens, of 1, 2 and 3 turns."""
    lines: list[dict[str, Any]] = [{"meta": {"schema": "kvtape/1"}}]
    for first in (1, 2, 3):
        for turn in range(first):
            later = {} if turn == 0 else {"parent_id": f"{first}.{turn - 1}", "think_ms": 100}
            outputs = {"output_tokens": 7 if turn == first - 1 else 5}
            lines.append(request(f"{first}.{turn}", 10 * first, first + 11 * turn, **outputs, **later))
    return write(tmp_path / "three", *lines)


def test_turns_select_and_truncate(three: Path) -> None:
    assert firsts(load(three, turns=LengthDistribution(2, 9))) == [2, 3, 2, 3, 2, 3, 2]
    assert [len(session.turns) for session in load(three, turns=LengthDistribution(1, 2), number=3)] == [1, 2, 2]
    with pytest.raises(InputError, match="three: no session of 4 turns or more"):
        load(three, turns=LengthDistribution(4, 4))


def test_flags_override_the_dataset(three: Path) -> None:
    *_, session = load(three, number=3)
    assert [turn.output_tokens for turn in session.turns] == [5, 5, 7]
    assert [turn.think_ms for turn in session.turns] == [0, 100, 100]
    *_, session = load(three, number=3, output_tokens=LengthDistribution(9, 9), think_s=LengthDistribution(2, 2))
    assert [turn.output_tokens for turn in session.turns] == [9, 9, 9]
    assert [turn.think_ms for turn in session.turns] == [0, 2000, 2000]
