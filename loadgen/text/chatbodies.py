"""Request bodies that carry a conversation: chat completions, Responses, Anthropic's messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.text.spoken import Spoken, chat_messages, messages_fields, responses_fields

TextApi = Literal["chat", "responses", "messages"]

PATHS: dict[TextApi, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

EXACT_LENGTHS: frozenset[TextApi] = frozenset({"chat", "responses"})
"""APIs in which an answer can be made as long as wanted, where the engine can; Anthropic's has no such field."""


def conversation_body(
    api: TextApi,
    model: str,
    conversation: Sequence[Spoken],
    max_tokens: int,
    *,
    stream: bool = True,
    extra: Mapping[str, Any] | None = None,
    dialect: Dialect = VLLM,
) -> bytes:
    """A body that asks for an answer of ``max_tokens`` tokens to a conversation; ``extra`` has the last word."""
    if api == "chat":
        chat = {"messages": chat_messages(conversation), **dialect.chat_fields(model, max_tokens, stream=stream)}
        return msgspec.json.encode(chat | dict(extra or {}))
    fields = _response(max_tokens, dialect) if api == "responses" else {"max_tokens": max_tokens, "temperature": 0}
    said = responses_fields(conversation) if api == "responses" else messages_fields(conversation)
    return msgspec.json.encode({"model": model, **said, **fields, "stream": stream} | dict(extra or {}))


def _response(max_tokens: int, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_output_tokens": max_tokens, "temperature": 0, "store": False}
    if dialect.name == "vllm":
        # Its own fields: past the end of the answer, and the tokens of both sides with the last event.
        fields |= {"ignore_eos": True, "enable_response_messages": True}
    return fields
