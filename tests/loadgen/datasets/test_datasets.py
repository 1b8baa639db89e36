"""Datasets: a few rows of each format as its users write it, the sessions they make, and bad rows by name."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.job import Shard, add_shares
from loadgen.core.lengths import LengthDistribution
from loadgen.datasets import DATASETS
from loadgen.datasets.session import ESTIMATED, DatasetOptions, DatasetSession
from loadgen.datasets.swesmith import take
from loadgen.plan.config import LoadConfig
from loadgen.plan.shapes import SessionShape
from loadgen.plan.workload import Workload
from loadgen.text.messages import SyntheticMessage
from tracefile import InputError

OPTIONS = DatasetOptions(lengths=ESTIMATED)
TRIE: dict[str, Any] = {
    "input_prompt_length": 1200,
    "num_turns": 2,
    "assistant_response_length": [40, 50],
    "tool_call_output_length": [300, 0],
    "tool_call_latency": [0.5, 2],
    "final_assistant_response_length": 60,
}
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


def read(name: str, path: Path, **options: Any) -> list[DatasetSession]:
    return list(DATASETS[name].read(path, replace(OPTIONS, **options)))


def said(session: DatasetSession) -> list[list[tuple[str, str]]]:
    return [[(quoted.role, quoted.text) for quoted in turn.quoted] for turn in session]


def test_trie_is_lengths_and_latencies(tmp_path: Path) -> None:
    (session,) = read("trie", write(tmp_path / "t", TRIE))
    assert [(turn.new_tokens, turn.output_tokens, turn.think_ms, turn.from_tool) for turn in session] == [
        (1200, 40, 0, False),
        (300, 50, 500, True),
        (1, 60, 2000, True),  # nothing cannot be asked: one token
    ]


def test_messages_turn_at_every_answer(tmp_path: Path) -> None:
    for row in (CHAT, {"messages": CHAT, "tools": []}, {"custom_id": "1", "body": {"model": "m", "messages": CHAT}}):
        (session,) = read("messages", write(tmp_path / "t", row))
        assert said(session) == [
            [("system", "be brief"), ("user", "one")],
            [("user", "two")],
            [("user", "found")],  # the model's real answer made no call that a tool's message could belong to
        ]
        # 40 letters at four a token; look{} is six letters.
        assert [turn.output_tokens for turn in session] == [10, 2, None]


def test_a_tool_message_stays_one_where_asked(tmp_path: Path) -> None:
    (session,) = read("messages", write(tmp_path / "t", CHAT), tool_role="tool")
    assert session[2].quoted[0].message == CHAT[5]


def test_messages_in_one_array(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(json.dumps([{"messages": CHAT}, {"messages": CHAT[:2]}], indent=1))
    assert [len(session) for session in read("messages", tmp_path / "t")] == [3, 1]


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
    assert said(first) == [[("user", "hi")], [("user", "more")]]
    assert [turn.output_tokens for turn in first] == [2, None]
    assert second == []


def test_sharegpt_by_lines(tmp_path: Path) -> None:
    row = {"conversation_id": 1, "conversation": [{"human": "hi", "assistant": "yo"}, {"human": "", "assistant": "x"}]}
    (session,) = read("sharegpt", write(tmp_path / "t", row))
    assert said(session) == [[("user", "hi")]]


def test_aiperf_conversations(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        {"session_id": "s", "turns": [{"role": "system", "text": "sys"}, {"text": "a", "output_length": 9}]},
        {"turns": [{"texts": ["b", "c"]}]},
        {"session_id": "s", "turns": [{"text": "d", "delay": 1500}]},
    )
    first, second = read("aiperf", path)
    assert said(first) == [[("system", "sys"), ("user", "a")], [("user", "d")]]
    assert [(turn.output_tokens, turn.think_ms) for turn in first] == [(9, None), (None, 1500)]
    assert second[0].quoted[0].message["content"] == [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]


TRAJECTORY = [{"role": "system", "content": "x" * 400}] + [
    {"role": role, "content": character * 40}
    for character in "abcdef"
    for role in ("user" if character in "ace" else "tool", "assistant")
]


@pytest.mark.parametrize("messages", [TRAJECTORY, json.dumps(TRAJECTORY)])
def test_swe_smith_cuts_turns_of_the_lengths_asked_for(tmp_path: Path, messages: Any) -> None:
    path = write(tmp_path / "t", {"instance_id": "i", "messages": messages})
    # Texts of 10 tokens each: 25 take two and half of the third, of which the rest is left out.
    (session,) = read(
        "swe-smith",
        path,
        first_turn_tokens=LengthDistribution(25, 25),
        subsequent_turn_tokens=LengthDistribution(10, 10),
    )
    assert said(session) == [
        [("user", "a" * 40), ("user", "b" * 40), ("user", "c" * 20)],
        [("user", "d" * 40)],
        [("user", "e" * 40)],
        [("user", "f" * 40)],
    ]
    three = {
        "min_turns": 3,
        "max_turns": 3,
        "first_turn_tokens": LengthDistribution(25, 25),
        "subsequent_turn_tokens": LengthDistribution(10, 10),
    }
    assert [len(session) for session in read("swe-smith", path, **three)] == [3]
    # Five cannot be filled: the trajectory is passed over.
    assert read("swe-smith", path, **(three | {"min_turns": 5, "max_turns": 5})) == []


def test_swe_smith_built_already(tmp_path: Path) -> None:
    turn = {"messages": [{"role": "user", "content": "a"}], "prompt_tokens": 12}
    (tmp_path / "t").write_text(json.dumps({"metadata": {}, "conversations": [[turn, turn], [turn]]}, indent=2))
    assert [len(session) for session in read("swe-smith", tmp_path / "t")] == [2, 1]
    assert said(read("swe-smith", tmp_path / "t")[1]) == [[("user", "a")]]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=8), st.integers(1, 40))
def test_a_turn_takes_no_more_than_its_length(texts: list[str], tokens: int) -> None:
    taken, at = take(texts, 0, tokens, ESTIMATED)
    assert sum(ESTIMATED.count(text) for text in taken) <= tokens
    assert at <= len(texts)
    # It stops short of its length only at the texts' end, or by less than the character that it would have cut.
    if at < len(texts):
        assert sum(ESTIMATED.count(text) for text in texts[:at]) >= tokens


def test_a_trace_is_its_sessions_lengths(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [1]}
    first, second = read("mooncake", write(tmp_path / "t", line, line | {"input_length": 610}))
    assert [(turn.new_tokens, turn.output_tokens, turn.think_ms) for turn in first] == [(600, 40, 0)]
    assert [turn.new_tokens for turn in second] == [610]


def test_a_bailian_turn_is_what_its_prompt_has_more(tmp_path: Path) -> None:
    row = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1,
        "input_length": 100,
        "output_length": 30,
        "hash_ids": [0] * 7,
    }
    later = row | {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9, "input_length": 170, "hash_ids": [0] * 11}
    branch = later | {"chat_id": 3, "timestamp": 10, "input_length": 180, "hash_ids": [0] * 12}
    first, second = read("bailian", write(tmp_path / "t", row, later, branch))
    assert [(turn.new_tokens, turn.output_tokens) for turn in first] == [(100, 30), (40, 30)]
    # The first to go on from a request goes on; another begins a session with all its prompt.
    assert [turn.new_tokens for turn in second] == [180]


def test_the_published_mooncake_trace_is_gone_through_once() -> None:
    folder = os.environ.get("KVTAPE_DATA")
    if not folder or not (path := Path(folder) / "mooncake" / "conversation_trace.jsonl").exists():
        pytest.skip("KVTAPE_DATA names no folder with mooncake/conversation_trace.jsonl")
    config = replace(LOAD, dataset="mooncake", dataset_path=path, number=None)
    assert Workload(config).survey().planned == 12_031
    assert sum(session.turns[0].prompt_tokens for session in Workload(config)) == 144_793_823


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("trie", TRIE | {"num_turns": 3}, ":1: assistant_response_length: 2 of them; expected 3"),
        ("trie", TRIE | {"tool_call_latency": [1, -1]}, r":1: tool_call_latency\[\d\]: Expected"),
        ("trie", {"num_turns": 1}, ":1: .*input_prompt_length"),
        ("messages", {"messages": []}, ":1: messages: no messages"),
        ("messages", {"messages": [{"content": "x"}]}, ":1: messages: message 1: .*role"),
        ("messages", [{"role": "user", "content": 5}], ":1: message 1: content: "),
        ("sharegpt", {"id": "a"}, ":1: conversations: missing"),
        ("sharegpt", {"conversations": [{"from": "martian", "value": "x"}]}, ":1: .*message 1: from: 'martian'"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, r":1: conversations\[\d\]: .*value"),
        ("aiperf", {"turns": []}, ":1: turns: empty"),
        ("aiperf", {"turns": [{"text": "x", "image": "u"}]}, ":1: turns: turn 1: image: present; expected text alone"),
        ("aiperf", {"turns": [{"delay": 3}]}, ":1: turns: turn 1: text: missing"),
        ("aiperf", {"turns": [{"text": "x", "output_length": 0}]}, r":1: turns\[\d\].output_length: "),
        ("swe-smith", {"trajectory": []}, ":1: messages: missing"),
        ("swe-smith", {"messages": "[{"}, ":1: messages: "),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, row: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(name, write(tmp_path / "t", row))


@pytest.mark.parametrize("name", sorted(DATASETS))
@pytest.mark.parametrize("text", ["", "\n\n", "{", "nonsense\n", "[1, 2]\n"])
def test_what_is_no_dataset_is_said_to_be_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(InputError, match=str(tmp_path / "t")):
        read(name, tmp_path / "t")


# A dataset as a load.

LOAD = LoadConfig(url="http://x", trace=Path("t"), parallel=2, number=7, dataset="trie", dataset_path=Path("d"), seed=3)


def load(path: Path, **changes: Any) -> list[SessionShape]:
    return list(Workload(replace(LOAD, dataset_path=path, **changes)))


def firsts(sessions: Sequence[SessionShape]) -> list[int]:
    return [session.turns[0].prompt_tokens for session in sessions]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Sessions whose first prompts are 1, 2 and 3 tokens, of 1, 2 and 3 turns."""
    rows = [
        {
            "input_prompt_length": number,
            "num_turns": number - 1,
            "assistant_response_length": [5] * (number - 1),
            "tool_call_output_length": [6] * (number - 1),
            "tool_call_latency": [0.1] * (number - 1),
            "final_assistant_response_length": 7,
        }
        for number in (1, 2, 3)
    ]
    return write(tmp_path / "three", *rows)


def test_a_dataset_is_begun_again(three: Path) -> None:
    assert firsts(load(three)) == [1, 2, 3, 1, 2, 3, 1]
    assert firsts(load(three, dataset_offset=2)) == [3, 1, 2, 3, 1, 2, 3]
    assert firsts(load(three, dataset_offset=4, number=2)) == [2, 3]
    # The same lengths again, but never the same tokens.
    assert len({turn.prompt_key for session in load(three) for turn in session.turns}) == 13


def test_without_bounds_a_dataset_is_gone_through_once(three: Path) -> None:
    assert firsts(load(three, number=None)) == [1, 2, 3]
    assert firsts(load(three, number=None, dataset_offset=1)) == [2, 3]
    assert Workload(replace(LOAD, dataset_path=three, number=None)).survey().planned == 6


def test_an_endless_load_goes_round_and_round(three: Path) -> None:
    endless = Workload(replace(LOAD, dataset_path=three, number=None, duration_s=9.0))
    assert firsts(list(islice(endless, 300))) == [1, 2, 3] * 100


def test_turns_choose_and_cut(three: Path) -> None:
    assert firsts(load(three, min_turns=2)) == [2, 3, 2, 3, 2, 3, 2]
    assert [len(session.turns) for session in load(three, max_turns=2, number=3)] == [1, 2, 2]
    with pytest.raises(InputError, match="three: no session of 4 turns or more"):
        load(three, min_turns=4)


def test_flags_rule_over_what_a_dataset_says(three: Path) -> None:
    (session,) = load(three, number=1, dataset_offset=2)
    assert [turn.output_tokens for turn in session.turns] == [5, 5, 7]
    assert [turn.think_ms for turn in session.turns] == [0, 100, 100]
    (session,) = load(
        three, number=1, dataset_offset=2, output_tokens=LengthDistribution(9, 9), think_s=LengthDistribution(2, 2)
    )
    assert [turn.output_tokens for turn in session.turns] == [9, 9, 9]
    assert [turn.think_ms for turn in session.turns] == [0, 2000, 2000]


def test_tool_outputs_may_be_tool_messages(three: Path) -> None:
    (session,) = load(three, number=1, dataset_offset=1, tool_role="tool")
    assert session.turns[0].said == ()
    (message,) = session.turns[1].said
    assert isinstance(message, SyntheticMessage)
    assert (message.role, message.tokens) == ("tool", 6)


@given(shards=st.integers(1, 5), number=st.integers(5, 40), offset=st.integers(0, 7))
def test_shards_of_a_dataset_are_the_whole(tmp_path_factory: Any, shards: int, number: int, offset: int) -> None:
    path = write(tmp_path_factory.mktemp("d") / "t", *[TRIE | {"input_prompt_length": length} for length in (1, 2, 3)])
    config = replace(LOAD, dataset_path=path, number=number, dataset_offset=offset, rate=5.0)
    whole = list(Workload(config))
    parts = [list(Workload(config, Shard(index, shards))) for index in range(shards)]
    assert sorted((session for part in parts for session in part), key=lambda session: session.index) == whole
    shares = [Workload(config, Shard(index, shards)).survey().digest_share for index in range(shards)]
    assert add_shares(shares) == add_shares([Workload(config).survey().digest_share])


def test_another_word_is_another_digest(tmp_path: Path) -> None:
    shares = []
    for name, word in (("a", "one"), ("b", "two"), ("c", "one")):
        path = write(tmp_path / name, [{"role": "user", "content": word}])
        config = replace(LOAD, dataset="messages", api="chat", dataset_path=path)
        shares.append(Workload(config).survey().digest_share)
    assert shares[0] == shares[2] != shares[1]
