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
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


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


def test_burstgpt_as_first_published(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(BURSTGPT + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log")
    first, failed = read(path, "burstgpt")
    assert (first.request_id, first.arrival_ms, first.prompt_tokens, first.output_tokens) == ("burstgpt-1", 0, 472, 18)
    assert (first.model, first.status, first.session_id, first.e2e_ms) == ("ChatGPT", "ok", None, None)
    assert first.extra == {"Log Type": "Conversation log"}
    # Their README: no response tokens means that it failed.
    assert (failed.arrival_ms, failed.status, failed.output_tokens) == (40_500, "error", 0)


def test_burstgpt_with_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(
        BURSTGPT_3
        + "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
        + "19440161.0,d5983bf9,2,ChatGPT,36,29,65,Conversation log\n"
        + "19440192.0,,,ChatGPT,36,29,65,API log\n"
    )
    first, second, third = read(path, "burstgpt")
    assert (first.session_id, first.e2e_ms, first.arrival_ms) == ("1722ac82", 43_000, 0)
    assert (second.session_id, second.e2e_ms, second.arrival_ms) == ("d5983bf9", 2_000, 51_000)
    assert (third.session_id, third.e2e_ms) == (None, None)


def test_azure_of_both_years(tmp_path: Path) -> None:
    old, new = tmp_path / "2023", tmp_path / "2024"
    old.write_text(AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    new.write_text(AZURE + "2024-05-12 00:00:10+00:00,200,20\r\n2024-05-12 00:00:10.250000+00:00,300,30\r\n")
    first, second = read(old, "azure")
    assert (first.request_id, first.arrival_ms, first.prompt_tokens, first.output_tokens) == ("azure-1", 0, 374, 44)
    assert second.arrival_ms == pytest.approx(4314.579, abs=0.001)
    assert second.block_hashes is None
    assert [record.arrival_ms for record in read(new, "azure")] == [0, 250]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(BAILIAN | {"hash_ids": [1]}), ":1: hash_ids: 1 ids; expected 2"),
        (json.dumps(BAILIAN | {"output_length": -1}), r":1: .*output_length"),
        (json.dumps(BAILIAN) + "\n" + json.dumps(BAILIAN), ":2: chat_id: 159 again"),
        (BURSTGPT + "x,ChatGPT,1,1,2,API log", ":2: Timestamp: 'x'"),
        (BURSTGPT + "1,ChatGPT,1,1,2", ":2: 5 cells; expected 6"),
        (BURSTGPT + "1,ChatGPT,1.5,1,2,API log", ":2: Request tokens: '1.5'; expected a whole number"),
        (AZURE + "yesterday,1,1", ":2: TIMESTAMP: 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,-1,1", ":2: ContextTokens: '-1'"),
        ("a,b\n1,2\n", ":1: begins with 'a,b'; expected a trace"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t").write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        load_trace(tmp_path / "t")
