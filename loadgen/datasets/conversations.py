"""Conversations with texts: OpenAI's messages, and ShareGPT.

``messages``, JSON Lines: an array of messages a line (evalscope's ``custom_multi_turn``), or an object with
``messages``, an array or an array as JSON string (OpenAI's fine-tuning, within ``body`` its batches, SWE-smith's
trajectories). Tool definitions of a row are not sent.

``sharegpt``: one JSON array of ``{"conversations": [{"from": "human" | "gpt" | …, "value"}]}``, as in vLLM's
benchmarks, or JSON Lines of ``{"conversation": [{"human", "assistant"}]}``, the swift/sharegpt of evalscope.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgen.datasets.rows import convert, decode, rows
from loadgen.datasets.session import CountTokens, DatasetSession, DatasetTurn
from loadgen.text.messages import VerbatimMessage
from tracefile.records.errors import InputError

Message = Mapping[str, Any]
MESSAGES = "an array of messages, each an object with role and content, or an object with messages"
SHAREGPT = "a ShareGPT conversation: conversations of from and value, or conversation of human and assistant"
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
    "tool": "tool",
}


class MessageRow(msgspec.Struct):
    """Required fields of a message."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class FromValue(msgspec.Struct):
    """Message of ShareGPT's array form."""

    from_: str = msgspec.field(name="from")
    value: str


class Exchange(msgspec.Struct):
    """Prompt and output of ShareGPT's JSON Lines form."""

    human: str = ""
    assistant: str = ""


class ShareGptRow(msgspec.Struct):
    """Conversation in either form."""

    conversations: list[FromValue] | None = None
    conversation: list[Exchange] | None = None


def read_messages(path: Path, count: CountTokens | None) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        yield session_of(_messages(decode(row, object, where, MESSAGES), where), count)


def read_sharegpt(path: Path, count: CountTokens | None) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        conversation = decode(row, ShareGptRow, where, SHAREGPT)
        if conversation.conversations is None and conversation.conversation is None:
            raise InputError(f"{where}: conversations: missing; expected {SHAREGPT}")
        yield session_of(_sharegpt_messages(conversation, where), count)


def session_of(messages: Iterable[Message], count: CountTokens | None) -> DatasetSession:
    """Split messages into turns at each assistant message; skip empty messages and outputs before any prompt.

    A tool result is sent as a user message, because the decoded output of the run has no tool call.
    """
    turns: list[DatasetTurn] = []
    prompt: list[VerbatimMessage] = []
    for message in messages:
        quoted = VerbatimMessage(dict(message))
        if quoted.role == "assistant":
            if _asks(prompt):
                tokens = None if count is None else count(quoted.text + _calls(message)) or None
                turns.append(DatasetTurn(quoted=prompt, output_tokens=tokens))
                prompt = []
        elif message.get("content"):
            is_tool = quoted.role == "tool"
            prompt.append(VerbatimMessage({"role": "user", "content": message["content"]}) if is_tool else quoted)
    return [*turns, DatasetTurn(quoted=prompt)] if _asks(prompt) else turns


def _asks(prompt: list[VerbatimMessage]) -> bool:
    return any(message.role != "system" for message in prompt)


def _messages(row: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(row, dict):
        body = row.get("body")
        row = (body if isinstance(body, dict) else row).get("messages")
        where = f"{where}: messages"
    if isinstance(row, str):
        row = decode(row.encode(), object, where, MESSAGES)
    if not isinstance(row, list) or not row:
        raise InputError(f"{where}: no messages; expected {MESSAGES}")
    for number, message in enumerate(row, start=1):
        convert(message, MessageRow, f"{where}: message {number}", MESSAGES)
    return row


def _calls(message: Message) -> str:
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", {}) for call in calls if isinstance(call, dict)]
    return "".join(f"{function.get('name', '')}{function.get('arguments', '')}" for function in functions)


def _sharegpt_messages(row: ShareGptRow, where: str) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(row.conversations or (), start=1):
        role = ROLES.get(message.from_)
        if role is None:
            raise InputError(
                f"{where}: conversations: message {number}: from: {message.from_!r}; expected one of {', '.join(ROLES)}"
            )
        yield {"role": role, "content": message.value}
    for exchange in row.conversation or ():
        if exchange.human.strip():
            yield {"role": "user", "content": exchange.human}
            yield {"role": "assistant", "content": exchange.assistant}
