"""Parser of Anthropic's ``/v1/messages`` responses: content blocks in named events, and the message object.

The delta of a content block carries a token if its text, thinking or partial JSON is not empty; a signature is not a
token of the model. The start of a ``tool_use`` block carries a token, too: the tool's name. ``message_start`` has the
usage of the prompt, ``message_delta`` the remaining usage.

Usage counts prompt tokens in three parts, whose sum is the prompt length: ``input_tokens`` (neither read from the
prefix cache nor written to it), ``cache_read_input_tokens``, ``cache_creation_input_tokens``. An absent part does not
change: some engines send all three parts at the end (and a smaller ``input_tokens``), others only at the start.
"""

from typing import Any

import msgspec

from wire.completion import Completion
from wire.events import token_count

FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
"""Anthropic's stop reasons as finish reasons of OpenAI's completions, for uniform traces."""
PROMPT_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class MessagesUsage(msgspec.Struct):
    """``usage`` of ``message_start`` or ``message_delta``: prompt tokens by cache part, output tokens."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None


class ContentBlock(msgspec.Struct):
    """A content block, complete or at its start, or a delta of a block or of the message."""

    type: str | None = None
    text: str | None = None
    name: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class MessageObject(msgspec.Struct):
    """A complete message, or the message of ``message_start``."""

    model: str | None = None
    stop_reason: str | None = None
    usage: MessagesUsage | None = None
    type: str | None = None
    error: Any = None
    content: list[ContentBlock] | None = None


class MessagesEvent(msgspec.Struct):
    """Streamed event."""

    type: str | None = None
    message: MessageObject | None = None
    content_block: ContentBlock | None = None
    delta: ContentBlock | None = None
    usage: MessagesUsage | None = None


_decode_event = msgspec.json.Decoder(MessagesEvent).decode
_decode_body = msgspec.json.Decoder(MessageObject).decode


def parse_messages_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a streamed event; return its number of tokens."""
    event = _decode_event(data)
    if event.type in ("content_block_start", "content_block_delta"):
        return _add_block(event.delta or event.content_block or ContentBlock(), texts)
    if event.message is not None:
        _add_message(completion, event.message)
    if event.type == "message_delta":
        _add_end(completion, (event.delta or ContentBlock()).stop_reason, event.usage)
    elif event.type == "message_stop":
        completion.done = True
    elif event.type == "error":
        completion.error_kind = "stream_error"
    return 0


def parse_message_body(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a complete body: usage and text, without token arrival times."""
    message = _decode_body(data)
    _add_message(completion, message)
    if message.type == "error" or message.error is not None:
        completion.error_kind = "stream_error"
    texts += [block.text for block in message.content or () if block.type == "text" and block.text]
    return 0


def _add_block(block: ContentBlock, texts: list[str]) -> int:
    """Add the text of a block's start or delta; return its number of tokens, 0 or 1."""
    if block.text:
        texts.append(block.text)
    return 1 if block.text or block.thinking or block.partial_json or block.name else 0


def _add_message(completion: Completion, message: MessageObject) -> None:
    completion.model = message.model or completion.model
    _add_end(completion, message.stop_reason, message.usage)


def _add_end(completion: Completion, stop_reason: str | None, usage: MessagesUsage | None) -> None:
    if stop_reason is not None:
        completion.finish_reason = FINISH_REASONS.get(stop_reason, stop_reason)
    if usage is None:
        return
    parts = completion.prompt_parts
    for name in PROMPT_PARTS:
        if (count := token_count(getattr(usage, name))) is not None:
            parts[name] = count
    if "input_tokens" in parts:
        completion.prompt_tokens = sum(parts.values())
    completion.cached_tokens = parts.get("cache_read_input_tokens")
    if (output := token_count(usage.output_tokens)) is not None:
        completion.output_tokens = output
