"""trie's workloads, JSON Lines: agents' traces as lengths of outputs and tool outputs, with how long each tool took.

Defined by applied-compute/trie (trie/types.py, ``Workload.from_jsonl_row``): ``input_prompt_length``, ``num_turns``,
as many of ``assistant_response_length``, ``tool_call_output_length`` and ``tool_call_latency`` (seconds), and
``final_assistant_response_length``. A row is ``num_turns`` + 1 requests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from loadgen.datasets.rows import decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn
from tracefile import InputError

EXPECTED = "a trie workload of lengths of 0 or more"

Length = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class TrieRow(msgspec.Struct):
    """Workload row as published."""

    input_prompt_length: Length
    num_turns: Length
    assistant_response_length: list[Length]
    tool_call_output_length: list[Length]
    tool_call_latency: list[Seconds]
    final_assistant_response_length: Length


def read_trie(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        found = decode(row, TrieRow, where, EXPECTED)
        for name in ("assistant_response_length", "tool_call_output_length", "tool_call_latency"):
            if (count := len(getattr(found, name))) != found.num_turns:
                raise InputError(f"{where}: {name}: {count} of them; expected {found.num_turns}, as num_turns says")
        yield list(_turns(found))


def _turns(found: TrieRow) -> Iterator[DatasetTurn]:
    """Yield the turns of a row; a length of 0 becomes 1 token."""
    outputs = [*found.assistant_response_length, found.final_assistant_response_length]
    yield DatasetTurn(max(1, found.input_prompt_length), output_tokens=max(1, outputs[0]), think_ms=0.0)
    tools = zip(found.tool_call_output_length, found.tool_call_latency, outputs[1:], strict=True)
    for tool_tokens, latency_s, output in tools:
        yield DatasetTurn(max(1, tool_tokens), from_tool=True, output_tokens=max(1, output), think_ms=latency_s * 1000)
