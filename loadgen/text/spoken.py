"""A conversation as each API has it: chat completions' messages, the Responses API's items, Anthropic's content blocks.

A tool's result is a message of its own in the first two, a block of the user's next message in the third; the call that
it answers belongs to the assistant's message before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.core.draws import TokenIds
from loadgen.text.tokenizer import Message

TOOL = "lookup"
"""What every call calls."""
OPENING_WORD = "find"
"""Begins every call's argument, so that the words behind it stand behind a space and are a token each."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """One message: what it says, and which tokens that is, as far as it is known."""

    role: str
    text: str
    numbers: TokenIds | None = None
    """Its words by number, where it is made of such."""
    ids: TokenIds | None = None
    """Its tokens, where they are known otherwise: generated, or a tokenizer's."""
    length: int | None = None
    """How many tokens it is; null: unknown."""
    calls: tuple["Call", ...] = ()
    """An assistant's: the calls that the tool messages right behind it answer, in their order."""
    quoted: Message | None = None
    """As it was given, where it was."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: the words of its argument, the opening one apart."""

    text: str
    numbers: TokenIds

    @property
    def arguments(self) -> dict[str, str]:
        """As a mapping."""
        return {"query": f"{OPENING_WORD} {self.text}"}

    @property
    def arguments_json(self) -> str:
        """As the APIs of OpenAI carry it."""
        return msgspec.json.encode(self.arguments).decode()


def call_ids(conversation: Sequence[Spoken]) -> list[list[str]]:
    """For each message the ids of its calls, or of the one call that it answers."""
    found: list[list[str]] = []
    open_ids: list[str] = []
    for place, message in enumerate(conversation):
        if message.role == "tool":
            found.append([open_ids.pop(0) if open_ids else f"call_{place}"])
        else:
            open_ids = [f"call_{place}_{number}" for number in range(len(message.calls))]
            found.append(list(open_ids))
    return found


def _calls(message: Spoken, ids: Sequence[str]) -> list[tuple[str, Call]]:
    """A message's calls with their ids; a tool's message has an id and makes none."""
    return list(zip(ids, message.calls, strict=True)) if message.calls else []


def chat_messages(conversation: Sequence[Spoken]) -> list[Message]:
    """``messages`` of a chat completion."""
    return [_chat_message(message, ids) for message, ids in zip(conversation, call_ids(conversation), strict=True)]


def _chat_message(message: Spoken, ids: Sequence[str]) -> Message:
    if message.quoted is not None:
        return message.quoted if message.role != "tool" else {**message.quoted, "tool_call_id": ids[0]}
    said: Message = {"role": message.role, "content": message.text}
    if message.role == "tool":
        said["tool_call_id"] = ids[0]
    if message.calls:
        said["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": TOOL, "arguments": call.arguments_json}}
            for call_id, call in _calls(message, ids)
        ]
    return said


def responses_fields(conversation: Sequence[Spoken]) -> dict[str, Any]:
    """``instructions`` and ``input`` of a response: the first system message is the instructions."""
    fields: dict[str, Any] = {}
    items: list[Message] = []
    for message, ids in zip(conversation, call_ids(conversation), strict=True):
        if message.role == "system" and not items and not fields:
            fields["instructions"] = message.text
        elif message.role == "tool":
            items.append({"type": "function_call_output", "call_id": ids[0], "output": message.text})
        else:
            items.append({"role": message.role, "content": message.text})
        items += [
            {"type": "function_call", "call_id": call_id, "name": TOOL, "arguments": call.arguments_json}
            for call_id, call in _calls(message, ids)
        ]
    return {**fields, "input": items}


def messages_fields(conversation: Sequence[Spoken]) -> dict[str, Any]:
    """``system`` and ``messages`` of Anthropic's API; results of tools open the user's next message."""
    systems = [message.text for message in conversation if message.role == "system"]
    turns: list[Message] = []
    for message, ids in zip(conversation, call_ids(conversation), strict=True):
        if message.role == "system":
            continue
        blocks: list[Message] = []
        if message.role == "tool":
            blocks.append({"type": "tool_result", "tool_use_id": ids[0], "content": message.text})
        elif message.text:
            blocks.append({"type": "text", "text": message.text})
        blocks += [
            {"type": "tool_use", "id": call_id, "name": TOOL, "input": call.arguments}
            for call_id, call in _calls(message, ids)
        ]
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return ({"system": "\n\n".join(systems)} if systems else {}) | {"messages": turns}
