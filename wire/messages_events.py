"""Responses of Anthropic's ``/v1/messages``: content blocks in named events, and the message itself.

A block's delta carries a token if its text, thinking or piece of JSON is not empty; a signature is none of the model's
tokens. So does the start of a ``tool_use`` block, which holds the tool's name. ``message_start`` opens and tells the
prompt's usage, ``message_delta`` tells the rest.

Usage counts the prompt in three parts, and only their sum is its length: ``input_tokens`` (neither read from the cache
nor written to it), ``cache_read_input_tokens``, ``cache_creation_input_tokens``. An event that leaves a part out leaves
it as it was: engines that learn of the cache at the end name all three there (and a smaller ``input_tokens``), others
say the prompt's parts once, at the start.
"""

from typing import Any

import msgspec

from wire.completion import Completion
from wire.events import token_count

FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
"""Anthropic's words in those of the completions, so that one trace speaks one language."""
PROMPT_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class MessagesUsage(msgspec.Struct):
    """``usage`` of a message or of its end."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None


class Part(msgspec.Struct):
    """A content block, whole or at its start, or what an event adds to it or to the message."""

    type: str | None = None
    text: str | None = None
    name: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class MessageObject(msgspec.Struct):
    """A message, whole or as a stream opens it."""

    model: str | None = None
    stop_reason: str | None = None
    usage: MessagesUsage | None = None
    type: str | None = None
    error: Any = None
    content: list[Part] | None = None


class MessagesEvent(msgspec.Struct):
    """Streamed event."""

    type: str | None = None
    message: MessageObject | None = None
    content_block: Part | None = None
    delta: Part | None = None
    usage: MessagesUsage | None = None


_decode_event = msgspec.json.Decoder(MessagesEvent).decode
_decode_whole = msgspec.json.Decoder(MessageObject).decode


def take_messages_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of one streamed event."""
    event = _decode_event(data)
    if event.type in ("content_block_start", "content_block_delta"):
        return _take_part(event.delta or event.content_block or Part(), texts)
    if event.message is not None:
        _take_message(completion, event.message)
    if event.type == "message_delta":
        _take_end(completion, (event.delta or Part()).stop_reason, event.usage)
    elif event.type == "message_stop":
        completion.done = True
    elif event.type == "error":
        completion.error_kind = "stream_error"
    return 0


def take_whole_message(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of a whole body."""
    message = _decode_whole(data)
    _take_message(completion, message)
    if message.type == "error" or message.error is not None:
        completion.error_kind = "stream_error"
    texts += [block.text for block in message.content or () if block.type == "text" and block.text]
    return 0


def _take_part(part: Part, texts: list[str]) -> int:
    """Add the text of a block's start or delta; returns whether it carried a token."""
    if part.text:
        texts.append(part.text)
    return 1 if part.text or part.thinking or part.partial_json or part.name else 0


def _take_message(completion: Completion, message: MessageObject) -> None:
    completion.model = message.model or completion.model
    _take_end(completion, message.stop_reason, message.usage)


def _take_end(completion: Completion, stop_reason: str | None, usage: MessagesUsage | None) -> None:
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
