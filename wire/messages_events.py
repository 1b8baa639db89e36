"""Responses of Anthropic's ``/v1/messages``: content blocks in named events, and the message itself.

A block's delta carries a token if its text, thinking or piece of JSON is not empty; a signature is none of the model's
tokens. So does the start of a ``tool_use`` block, which holds the tool's name. ``message_start`` opens and tells the
prompt's usage, ``message_delta`` tells the rest.

Usage counts the prompt in three parts, and only their sum is its length: ``input_tokens`` (neither read from the cache
nor written to it), ``cache_read_input_tokens``, ``cache_creation_input_tokens``. An event that leaves a part out leaves
it as it was: engines that learn of the cache at the end name all three there (and a smaller ``input_tokens``), others
say the prompt's parts once, at the start.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from wire.completion import Completion, EventTaker
from wire.events import token_count

FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
"""Anthropic's words in those of the completions, so that one trace speaks one language."""


class MessagesUsage(msgspec.Struct):
    """``usage`` of a message or of its end."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None


class Block(msgspec.Struct):
    """A content block, whole or at its start."""

    type: str | None = None
    text: str | None = None
    name: str | None = None


class BlockDelta(msgspec.Struct):
    """Addition of an event to a block, or to the message."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class MessageObject(msgspec.Struct):
    """A message, without its content."""

    model: str | None = None
    stop_reason: str | None = None
    usage: MessagesUsage | None = None
    type: str | None = None
    error: Any = None


class WholeMessage(MessageObject):
    """A message that was not streamed."""

    content: list[Block] | None = None


class MessagesEvent(msgspec.Struct):
    """Streamed event."""

    type: str | None = None
    message: MessageObject | None = None
    content_block: Block | None = None
    delta: BlockDelta | None = None
    usage: MessagesUsage | None = None


_decode_event = msgspec.json.Decoder(MessagesEvent).decode
_decode_whole = msgspec.json.Decoder(WholeMessage).decode


@dataclass(slots=True)
class PromptParts:
    """The prompt's three parts as told so far."""

    uncached: int | None = None
    read: int | None = None
    written: int | None = None

    def take(self, completion: Completion, usage: MessagesUsage) -> None:
        """Add what this usage says; what it does not say stays as it was."""
        self.uncached = _later(self.uncached, usage.input_tokens)
        self.read = _later(self.read, usage.cache_read_input_tokens)
        self.written = _later(self.written, usage.cache_creation_input_tokens)
        if self.uncached is not None:
            completion.prompt_tokens = self.uncached + (self.read or 0) + (self.written or 0)
        completion.cached_tokens = self.read
        completion.output_tokens = _later(completion.output_tokens, usage.output_tokens)


def _later(known: int | None, told: int | None) -> int | None:
    counted = token_count(told)
    return known if counted is None else counted


def messages_event_taker() -> EventTaker:
    """The taker of one response's streamed events."""
    parts = PromptParts()

    def take(completion: Completion, data: bytes, texts: list[str]) -> int:
        event = _decode_event(data)
        if event.type == "content_block_delta":
            return _take_delta(event.delta, texts)
        if event.type == "content_block_start":
            return _take_start(event.content_block, texts)
        if event.message is not None:
            _take_message(completion, event.message, parts)
        if event.type == "message_delta":
            _take_end(completion, event, parts)
        elif event.type == "message_stop":
            completion.done = True
        elif event.type == "error":
            completion.error_kind = "stream_error"
        return 0

    return take


def take_whole_message(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of a whole body."""
    message = _decode_whole(data)
    _take_message(completion, message, PromptParts())
    if message.type == "error" or message.error is not None:
        completion.error_kind = "stream_error"
    texts += [block.text for block in message.content or () if block.type == "text" and block.text]
    return 0


def _take_delta(delta: BlockDelta | None, texts: list[str]) -> int:
    if delta is None:
        return 0
    if delta.text:
        texts.append(delta.text)
    return 1 if delta.text or delta.thinking or delta.partial_json else 0


def _take_start(block: Block | None, texts: list[str]) -> int:
    if block is None:
        return 0
    if block.text:
        texts.append(block.text)
    return 1 if block.text or block.name else 0


def _take_message(completion: Completion, message: MessageObject, parts: PromptParts) -> None:
    completion.model = message.model or completion.model
    completion.finish_reason = _finish_reason(message.stop_reason)
    if message.usage is not None:
        parts.take(completion, message.usage)


def _take_end(completion: Completion, event: MessagesEvent, parts: PromptParts) -> None:
    if event.delta is not None and event.delta.stop_reason is not None:
        completion.finish_reason = _finish_reason(event.delta.stop_reason)
    if event.usage is not None:
        parts.take(completion, event.usage)


def _finish_reason(stop_reason: str | None) -> str | None:
    return None if stop_reason is None else FINISH_REASONS.get(stop_reason, stop_reason)
