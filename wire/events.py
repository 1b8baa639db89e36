"""Fields of engines' responses, typed widely; unnamed fields are skipped, and no Struct is tracked by the collector."""

from collections.abc import Callable
from typing import Any

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises on bytes that no engine sends."""
MOST_TOKENS = 1 << 40


def token_count(told: int | None) -> int | None:
    """``told`` if it can be a number of tokens."""
    return told if told is not None and 0 <= told <= MOST_TOKENS else None


class TokensDetails(msgspec.Struct, gc=False):
    """Details of the prompt's tokens in a usage."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """``usage`` of OpenAI's completions and chat completions."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokensDetails | None = None


class Timings(msgspec.Struct, gc=False):
    """llama.cpp's ``timings``: tokens of the prompt that were computed, those taken from its cache, and those made."""

    prompt_n: int | None = None
    cache_n: int | None = None
    predicted_n: int | None = None


class ToolFunction(msgspec.Struct, gc=False):
    """A tool call's name and (part of) its arguments."""

    name: str | None = None
    arguments: Any = None
    """JSON in a string, or, from engines that are free with it, the value itself."""


class ToolCall(msgspec.Struct, gc=False):
    """Tool call of a message or of a delta."""

    function: ToolFunction | None = None


class Message(msgspec.Struct, gc=False):
    """A chat choice's message, or the part of it that a streamed event adds."""

    content: str | list[Any] | None = None
    """Text, or a list of parts as in a request."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct, gc=False):
    """Choice, streamed or whole, of either endpoint."""

    index: int | None = 0
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    """``token_ids`` by SGLang's name in whole chats."""


class Event(msgspec.Struct, gc=False):
    """Streamed event, or a whole response body."""

    model: str | None = None
    choices: list[Choice] | None = None
    object: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


decode_event: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode
"""One event's data, or a whole body. Raises one of ``UNREADABLE`` if it is not what an engine sends."""


def choice_text(choice: Choice) -> str:
    """Return a choice's text for the user."""
    message = choice.delta or choice.message
    if choice.text or message is None:
        return choice.text or ""
    if not isinstance(message.content, list):
        return message.content or ""
    return "".join(str(part["text"]) for part in message.content if isinstance(part, dict) and "text" in part)


def has_unspoken(choice: Choice) -> bool:
    """Return whether a choice holds tokens beside its text: reasoning or a tool call."""
    message = choice.delta or choice.message
    if message is None:
        return False
    if message.reasoning_content or message.reasoning:
        return True
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    return any(function.name or function.arguments for function in functions)
