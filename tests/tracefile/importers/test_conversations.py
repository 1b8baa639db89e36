"""Traces of conversations: Weka and trie, a few rows of each."""

import json
from pathlib import Path
from typing import Any

import pytest

from tracefile import InputError, Record, TraceFormat, load_trace, open_trace
from tracefile.hashing.blockhash import invented_blocks

WEKA: dict[str, Any] = {
    "id": "c1",
    "models": ["m"],
    "block_size": 4,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 9, "out": 3, "hash_ids": [1, 2, 3], "stop": "tool_use", "api_time": 2},
        {
            "t": 5.0,
            "type": "subagent",
            "agent_id": "a",
            "requests": [{"t": 1.0, "type": "s", "in": 4, "out": 1, "hash_ids": [1]}],
        },
        {"t": 9.5, "type": "s", "model": "m", "in": 17, "out": 3, "hash_ids": [1, 2, 3, 4, 5], "ttft": 0.25},
    ],
}  # fmt: skip
TRIE = {
    "num_turns": 1,
    "input_prompt_length": 32,
    "assistant_response_length": [16],
    "tool_call_output_length": [8],
    "tool_call_latency": [0.5],
    "final_assistant_response_length": 64,
}


def read(path: Path, expected: TraceFormat, *lines: Any) -> tuple[list[Record], list[str]]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_trace(path) as reader:
        assert reader.format == expected
        records = list(reader)
        return records, reader.warnings


@pytest.mark.parametrize("indent", [None, 2])
def test_a_weka_conversation_with_a_subagent(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(WEKA, indent=indent))
    with open_trace(path) as reader:
        assert reader.format == "weka"
        first, third, agent = reader
        assert reader.warnings == []
    assert (first.request_id, first.turn, first.arrival_ms, first.e2e_ms) == ("c1-1", 1, 0.0, 2000.0)
    assert (first.finish_reason, first.stream, len(first.block_hashes or [])) == ("tool_calls", False, 2)
    assert (third.parent_id, third.turn, third.think_ms, third.ttft_ms) == ("c1-1", 2, 7500.0, 250.0)
    assert (third.block_hashes or [])[:2] == first.block_hashes
    # The agent's t counts from its own start, 5 s into the conversation; its blocks are the conversation's.
    assert (agent.session_id, agent.arrival_ms, agent.parent_id) == ("c1::a", 6000.0, None)
    assert agent.block_hashes == (first.block_hashes or [])[:1]


def test_weka_block_ids_are_local_to_a_conversation(tmp_path: Path) -> None:
    records, warnings = read(tmp_path / "t", "weka", WEKA, WEKA | {"id": "c2"})
    first, other = records[0].block_hashes or [], records[3].block_hashes or []
    assert not set(first) & set(other)
    assert warnings == ["2 conversations, each on a clock of its own: all begin at t = 0"]


def test_trie_rows_become_sessions_that_share_nothing(tmp_path: Path) -> None:
    (first, second, other, _), warnings = read(tmp_path / "t", "trie", TRIE, TRIE)
    assert (first.prompt_tokens, first.output_tokens, first.think_ms) == (32, 16, None)
    assert (second.prompt_tokens, second.output_tokens, second.think_ms) == (56, 64, 500.0)  # 32 + 16 + 8
    assert (second.session_id, second.parent_id, second.turn) == ("trie-1", "trie-1.1", 2)
    # 47 computed tokens end within the third block, which the second prompt fills.
    assert (len(second.block_hashes or []), first.output_block_hashes) == (3, [])
    assert (second.block_hashes or [])[:2] == first.block_hashes
    assert (second.block_hashes, second.output_block_hashes) == (invented_blocks(1, 0, 3), invented_blocks(1, 3, 7))
    assert not set(first.block_hashes or []) & set(other.block_hashes or [])
    assert warnings == []


def trie_of(prompt_tokens: int, num_turns: int) -> dict[str, Any]:
    lists = ("assistant_response_length", "tool_call_output_length", "tool_call_latency")
    return TRIE | dict.fromkeys(lists, [0] * num_turns) | {"num_turns": num_turns, "input_prompt_length": prompt_tokens}


def weka_of(**fields: Any) -> dict[str, Any]:
    return WEKA | {"requests": [WEKA["requests"][0] | fields]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (TRIE | {"num_turns": 2}, "assistant_response_length: 1 of them; expected 2, as num_turns says"),
        (WEKA | {"requests": [{"t": 0, "type": "n", "in": -1, "out": 1}]}, r"requests: item 1: .*\$.in"),
        ({"benchmarks": []}, "a guidellm report, no longer read; expected a trace that a tap recorded"),
        ({"resourceSpans": []}, "OpenTelemetry spans, no longer read; expected a trace that a tap recorded"),
        ({"input_length": 5, "session_id": "a"}, "a Mooncake line of AIPerf's, no longer read"),
        (weka_of(hash_ids=[-1, 2, 3]), r"requests: item 1: .*\$.hash_ids"),
        (weka_of(hash_ids=[2**64, 2, 3]), r"requests: item 1: .*\$.hash_ids"),
        (weka_of(t=1e15), r"requests: item 1: .*\$.t"),
        (TRIE | {"input_prompt_length": 1 << 24}, "a session's prompt grows to 16,777,240 tokens; expected at most"),
        (trie_of(1 << 19, 1000), "num_turns: the prompts of 512 turns have 16,793,344 blocks; expected at most"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="t:1: .*" + message):
        load_trace(path)


def test_an_array_of_rows_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([TRIE, TRIE], indent=1))
    assert len(load_trace(path)[1]) == 4
