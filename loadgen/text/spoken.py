"""A conversation in each API: chat completions' messages, the Responses API's items, Anthropic's content blocks.

A tool's result is a message in the first two, a block of the user's next message in the third.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.bodyfields import merge_patch
from loadgen.text.tokenizer import Message

if TYPE_CHECKING:
    from loadgen.core.draws import TokenIds

TextApi = Literal["chat", "responses", "messages"]
Api = Literal["completions", TextApi]

PATHS: dict[TextApi, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

TOOL = "lookup"
OPENING_WORD = "find"
"""First word of every call's argument: the words behind it follow a space."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Message: its text, and its tokens as far as they are known."""

    role: str
    text: str
    numbers: "TokenIds | None" = None
    """Word numbers, if it consists of words."""
    ids: "TokenIds | None" = None
    """Its tokens, generated or encoded; null: unknown."""
    length: int | None = None
    calls: tuple["Call", ...] = ()
    """Calls of an assistant, in the order of the tool messages behind it."""
    quoted: Message | None = None
    """Verbatim message; null: made of words."""


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call: the words of its argument without the opening word."""

    text: str
    numbers: "TokenIds"

    @property
    def arguments(self) -> dict[str, str]:
        return {"query": f"{OPENING_WORD} {self.text}"}

    @property
    def arguments_json(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


def call_ids(conversation: Sequence[SentMessage]) -> list[list[str]]:
    """Ids of each message's calls, or of the call that it answers."""
    found: list[list[str]] = []
    open_ids: list[str] = []
    for place, message in enumerate(conversation):
        if message.role == "tool":
            found.append([open_ids.pop(0) if open_ids else f"call_{place}"])
        else:
            open_ids = [f"call_{place}_{number}" for number in range(len(message.calls))]
            found.append(list(open_ids))
    return found


def _calls(message: SentMessage, ids: Sequence[str]) -> list[tuple[str, Call]]:
    return list(zip(ids, message.calls, strict=True)) if message.calls else []


def chat_messages(conversation: Sequence[SentMessage]) -> list[Message]:
    return [_chat_message(message, ids) for message, ids in zip(conversation, call_ids(conversation), strict=True)]


def _chat_message(message: SentMessage, ids: Sequence[str]) -> Message:
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


def responses_fields(conversation: Sequence[SentMessage]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    items: list[Message] = []
    for message, ids in zip(conversation, call_ids(conversation), strict=True):
        if message.role == "system" and not items and not fields:
            fields["instructions"] = message.text
        elif message.role == "tool":
            items.append({"type": "function_call_output", "call_id": ids[0], "output": message.text})
        else:
            # OpenAI takes messages without a type; llama.cpp takes no assistant's.
            items.append({"type": "message", "role": message.role, "content": message.text})
        items += [
            {"type": "function_call", "call_id": call_id, "name": TOOL, "arguments": call.arguments_json}
            for call_id, call in _calls(message, ids)
        ]
    return {**fields, "input": items}


def messages_fields(conversation: Sequence[SentMessage]) -> dict[str, Any]:
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


def conversation_body(
    api: TextApi,
    model: str,
    conversation: Sequence[SentMessage],
    max_tokens: int,
    *,
    stream: bool = True,
    extra: Mapping[str, Any] | None = None,
    dialect: Dialect = VLLM,
) -> bytes:
    """Body that asks for ``max_tokens`` tokens; ``extra``: a merge patch."""
    fields = merge_patch(own_fields(api, model, max_tokens, stream=stream, dialect=dialect), extra or {})
    return msgspec.json.encode(SPOKEN[api](conversation) | fields)


def own_fields(api: Api, model: str, max_tokens: int, *, stream: bool, dialect: Dialect) -> dict[str, Any]:
    """Return all fields of a load's request but its prompt."""
    if api == "completions":
        return dialect.completion_fields(model, max_tokens, stream=stream)
    if api == "chat":
        return dialect.chat_fields(model, max_tokens, stream=stream)
    fields = _response(max_tokens, dialect) if api == "responses" else {"max_tokens": max_tokens, "temperature": 0}
    return {"model": model, **fields, "stream": stream}


SPOKEN: Mapping[TextApi, Callable[[Sequence[SentMessage]], dict[str, Any]]] = {
    "chat": lambda conversation: {"messages": chat_messages(conversation)},
    "responses": responses_fields,
    "messages": messages_fields,
}
"""Fields of a conversation by API."""


def _response(max_tokens: int, dialect: Dialect) -> dict[str, Any]:
    asked = max_tokens + dialect.responses_headroom
    fields: dict[str, Any] = {"max_output_tokens": asked, "temperature": 0, "store": False}
    if dialect.name == "vllm":
        # Its own fields: past the end of the response, and the tokens of both sides with the last event.
        fields |= {"ignore_eos": True, "enable_response_messages": True}
    return fields
