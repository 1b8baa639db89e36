"""Conversations of OpenAI messages, JSON Lines: an array of messages a line, or an object with ``messages``.

An array is evalscope's ``custom_multi_turn`` (evalscope/perf/plugin/datasets/custom.py); ``messages`` is OpenAI's
format for fine-tuning, and, within ``body``, for batches. Tools that a row offers are not sent.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from loadgen.datasets.rows import convert, decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn
from loadgen.text.messages import VerbatimMessage
from tracefile import InputError

Message = Mapping[str, Any]
EXPECTED = "an array of messages, each an object with role and content, or an object with messages"


class MessageRow(msgspec.Struct):
    """Required fields of a message."""

    role: str
    content: str | list[dict[str, Any]] | None = None


def read_messages(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        messages = messages_of(decode(row, object, where, EXPECTED), where)
        yield session_of(messages, options)


def messages_of(found: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(found, dict):
        body = found.get("body")
        found = (body if isinstance(body, dict) else found).get("messages")
        where = f"{where}: messages"
    if not isinstance(found, list) or not found:
        raise InputError(f"{where}: no messages; expected {EXPECTED}")
    for number, message in enumerate(found):
        convert(message, MessageRow, f"{where}: message {number + 1}", EXPECTED)
    return found


def session_of(messages: Iterable[Message], options: DatasetOptions) -> DatasetSession:
    """Split messages into turns at each assistant message; skip empty messages and outputs before any prompt."""
    return list(islice(_turns(messages, options), options.max_turns))


def _turns(messages: Iterable[Message], options: DatasetOptions) -> Iterator[DatasetTurn]:
    said: list[VerbatimMessage] = []
    from_tool = False
    for message in messages:
        quoted = VerbatimMessage(dict(message))
        if quoted.role == "assistant":
            if any(each.role != "system" for each in said):
                yield DatasetTurn(quoted=said, from_tool=from_tool, output_tokens=_length(quoted, options))
                said, from_tool = [], False
        elif message.get("content"):
            from_tool = from_tool or quoted.role == "tool"
            said.append(as_user(quoted) if quoted.role == "tool" and options.tool_role == "user" else quoted)
    if any(each.role != "system" for each in said):
        yield DatasetTurn(quoted=said, from_tool=from_tool)


def as_user(tool: VerbatimMessage) -> VerbatimMessage:
    """A tool's result as a user's message: the model's real output made no call."""
    return VerbatimMessage({"role": "user", "content": tool.message["content"]})


def _length(response: VerbatimMessage, options: DatasetOptions) -> int | None:
    """Return the output's length in tokens; null: empty, or not wanted."""
    if not options.counts_outputs:
        return None
    return options.lengths.count(response.text + _calls(response.message)) or None


def _calls(message: Message) -> str:
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", {}) for call in calls if isinstance(call, dict)]
    return "".join(f"{function.get('name', '')}{function.get('arguments', '')}" for function in functions)
