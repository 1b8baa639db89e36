"""Published traces of others: a few rows of each, as published, and what is made of them; bad rows are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefile import InputError, Record, TraceFormat, load_trace, open_trace
from tracefile.importers.blocktraces import chained

BAILIAN: dict[str, Any] = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 40,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 6326],
}


def write_lines(path: Path, *objects: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(found) + "\n" for found in objects))
    return path


def read(path: Path, expected: TraceFormat) -> list[Record]:
    with open_trace(path) as reader:
        assert reader.format == expected
        records = list(reader)
        assert reader.warnings == []
    return records


def test_bailian_chats_become_sessions(tmp_path: Path) -> None:
    later = BAILIAN | {"chat_id": 160, "parent_chat_id": 159, "timestamp": 75.5, "turn": 2, "input_length": 64}
    branch = later | {"chat_id": 161, "timestamp": 76, "hash_ids": [1089, 1090, 7, 8]}
    path = write_lines(tmp_path / "t", BAILIAN, later | {"hash_ids": [1089, 1090, 5, 6]}, branch)
    first, second, third = read(path, "bailian")
    assert (first.request_id, first.session_id, first.parent_id, first.turn) == ("bailian-159", "bailian-159", None, 1)
    assert (first.arrival_ms, first.prompt_tokens, first.output_tokens) == (61_114.0, 40, 7)
    assert first.extra == {"type": "text"}
    # 40 tokens are two full blocks of 16: the third id is a partial block's, padded or not.
    assert first.block_hashes == list(chained([1089, 1090]))
    assert second.block_hashes == list(chained([1089, 1090, 5, 6]))
    assert (second.session_id, second.parent_id, second.turn) == ("bailian-159", "bailian-159", 2)
    assert (third.session_id, third.parent_id) == ("bailian-159", "bailian-159")
    assert load_trace(path)[0].block_size == 16


def test_a_bailian_chat_whose_parent_came_before_the_trace_names_its_session_by_it(tmp_path: Path) -> None:
    first = BAILIAN | {"parent_chat_id": 55}
    second = BAILIAN | {"chat_id": 160, "parent_chat_id": 159}
    assert [record.session_id for record in read(write_lines(tmp_path / "t", first, second), "bailian")] == [
        "bailian-55",
        "bailian-55",
    ]


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_chained_ids_are_equal_as_far_as_the_prompts_are(first: list[int], second: list[int]) -> None:
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    left, right = list(chained(first)), list(chained(second))
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(BAILIAN | {"hash_ids": [1]}), ":1: hash_ids: 1 ids; expected 2"),
        (json.dumps(BAILIAN | {"output_length": -1}), r":1: .*output_length"),
        (json.dumps(BAILIAN) + "\n" + json.dumps(BAILIAN), ":2: chat_id: 159 again"),
        ("a,b\n1,2\n", ":1: begins with 'a,b'; expected a trace"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t").write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        load_trace(tmp_path / "t")
