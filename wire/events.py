"""Fields of engine responses: usage, choices, token ids. Unknown fields are skipped; Structs are not GC-tracked."""

from collections.abc import Callable
from typing import Any

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of a decoder on invalid data."""
MOST_TOKENS = 1 << 40


def token_count(reported: int | None) -> int | None:
    """Return ``reported`` if it is a valid number of tokens, else None."""
    return reported if reported is not None and 0 <= reported <= MOST_TOKENS else None


class TokensDetails(msgspec.Struct, gc=False):
    """``prompt_tokens_details`` of a usage: cached tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """``usage`` of OpenAI's completions and chat completions: prompt and output tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokensDetails | None = None


class Timings(msgspec.Struct, gc=False):
    """llama.cpp's ``timings``: computed prompt tokens, cached prompt tokens, output tokens."""

    prompt_n: int | None = None
    cache_n: int | None = None
    predicted_n: int | None = None


class ToolFunction(msgspec.Struct, gc=False):
    """Name and (partial) arguments of a tool call."""

    name: str | None = None
    arguments: Any = None
    """JSON text, or the value itself from some engines."""


class ToolCall(msgspec.Struct, gc=False):
    """Tool call of a message or of a delta."""

    function: ToolFunction | None = None


class Message(msgspec.Struct, gc=False):
    """Message of a chat choice, or its delta in a streamed event."""

    content: str | list[Any] | None = None
    """Text, or a list of content parts as in a request."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct, gc=False):
    """Choice of a completion or chat completion, streamed or complete, with text or token ids."""

    index: int | None = 0
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    """SGLang's name of ``token_ids`` in chats that are not streamed."""


class Event(msgspec.Struct, gc=False):
    """Streamed event, or a complete response body."""

    model: str | None = None
    choices: list[Choice] | None = None
    object: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


decode_event: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode
"""Decoder of an event's data or a complete body. Raises one of ``UNREADABLE`` for invalid data."""


def choice_text(choice: Choice) -> str:
    """Return the text of a choice, without reasoning and tool calls."""
    message = choice.delta or choice.message
    if choice.text or message is None:
        return choice.text or ""
    if not isinstance(message.content, list):
        return message.content or ""
    return "".join(str(part["text"]) for part in message.content if isinstance(part, dict) and "text" in part)


def has_reasoning_or_tool_call(choice: Choice) -> bool:
    """Return whether a choice has tokens without text: reasoning or a tool call."""
    message = choice.delta or choice.message
    if message is None:
        return False
    if message.reasoning_content or message.reasoning:
        return True
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    return any(function.name or function.arguments for function in functions)
