"""A conversation as the body of each API: chat messages, Responses API items, Anthropic content blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.bodyfields import merge_patch

if TYPE_CHECKING:
    from loadgen.core.draws import TokenIds

Message = dict[str, Any]
TextApi = Literal["chat", "responses", "messages"]
Api = Literal["completions", TextApi]

PATHS: dict[TextApi, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Message: its text, and its tokens if known."""

    role: str
    text: str
    numbers: "TokenIds | None" = None
    """Word numbers, if it consists of words."""
    ids: "TokenIds | None" = None
    """Token ids, generated or encoded; null: unknown."""
    length: int | None = None
    quoted: Message | None = None
    """Verbatim message; null: made of words."""


def chat_messages(conversation: Sequence[SentMessage]) -> list[Message]:
    return [message.quoted or {"role": message.role, "content": message.text} for message in conversation]


def responses_fields(conversation: Sequence[SentMessage]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    items: list[Message] = []
    for message in conversation:
        if message.role == "system" and not items and not fields:
            fields["instructions"] = message.text
        else:
            # OpenAI accepts messages without a type; llama.cpp rejects assistant messages without it.
            items.append({"type": "message", "role": message.role, "content": message.text})
    return {**fields, "input": items}


def messages_fields(conversation: Sequence[SentMessage]) -> dict[str, Any]:
    systems = [message.text for message in conversation if message.role == "system"]
    turns: list[Message] = []
    for message in conversation:
        if message.role == "system" or not message.text:
            continue
        role, block = "assistant" if message.role == "assistant" else "user", {"type": "text", "text": message.text}
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"].append(block)
        else:
            turns.append({"role": role, "content": [block]})
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
    """Body for ``max_tokens`` output tokens; ``extra``: a merge patch."""
    fields = merge_patch(_load_fields(api, model, max_tokens, stream=stream, dialect=dialect), extra or {})
    return msgspec.json.encode(CONVERSATION_FIELDS[api](conversation) | fields)


def _load_fields(api: TextApi, model: str, max_tokens: int, *, stream: bool, dialect: Dialect) -> dict[str, Any]:
    """All fields of a request except its prompt: model, token limit, streaming."""
    if api == "chat":
        return dialect.chat_fields(model, max_tokens, stream=stream)
    fields = _response(max_tokens, dialect) if api == "responses" else {"max_tokens": max_tokens, "temperature": 0}
    return {"model": model, **fields, "stream": stream}


CONVERSATION_FIELDS: Mapping[TextApi, Callable[[Sequence[SentMessage]], dict[str, Any]]] = {
    "chat": lambda conversation: {"messages": chat_messages(conversation)},
    "responses": responses_fields,
    "messages": messages_fields,
}


def _response(max_tokens: int, dialect: Dialect) -> dict[str, Any]:
    limit = max_tokens + dialect.responses_headroom
    fields: dict[str, Any] = {"max_output_tokens": limit, "temperature": 0, "store": False}
    if dialect.name == "vllm":
        # vLLM's fields: decode past the end token, and return prompt and output tokens with the last event.
        fields |= {"ignore_eos": True, "enable_response_messages": True}
    return fields
