"""Datasets that are almost right: every file is sessions or an InputError that names it, never anything else."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.datasets import DATASETS
from loadgen.plan.config import LoadConfig
from loadgen.plan.workload import Workload
from tracefile.records.errors import InputError

NAMES = [
    *("messages", "role", "content", "conversations", "conversation", "from", "value", "human", "assistant", "turns"),
    *("text", "texts", "delay", "session_id", "tool_calls", "function", "arguments", "type", "body", "prompt_tokens"),
    *("input_prompt_length", "num_turns", "assistant_response_length", "tool_call_output_length", "tool_call_latency"),
    *("final_assistant_response_length", "input_length", "output_length", "hash_ids", "timestamp", "chat_id"),
    *("parent_chat_id", "turn", "request_id", "meta", "schema"),
]
WORDS = ["user", "assistant", "system", "tool", "human", "gpt", "", "x", "kvtape/1", "[]"]

scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 2000), st.floats(allow_nan=False), st.sampled_from(WORDS))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(WORDS), "content": values}, optional={"tool_calls": values, "from": values}
)
rows = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), values, max_size=8),
    st.lists(messages, max_size=4),
    st.fixed_dictionaries({"messages": st.lists(messages, max_size=4)}),
    st.fixed_dictionaries({"turns": st.lists(st.dictionaries(st.sampled_from(NAMES), values, max_size=4), max_size=3)}),
    values,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "d"


@pytest.mark.parametrize("name", sorted(DATASETS))
@settings(max_examples=30)
@given(items=st.lists(rows, min_size=1, max_size=3), as_array=st.booleans())
def test_any_json_is_sessions_or_an_error_that_names_the_file(
    name: str, items: list[Any], as_array: bool, path: Path
) -> None:
    path.write_text(json.dumps(items) if as_array else "".join(json.dumps(row) + "\n" for row in items))
    config = LoadConfig(
        url="http://x", trace=Path("t"), dataset=name, dataset_path=path, api="chat", parallel=1, number=4
    )
    try:
        sessions = list(islice(Workload(config), 4))
        Workload(replace(config, number=len(sessions))).survey()
    except InputError as error:
        refused = str(error)
    else:
        assert all(session.turns for session in sessions)
        assert all(turn.output_tokens > 0 and turn.think_ms >= 0 for session in sessions for turn in session.turns)
        return
    assert str(path) in refused
