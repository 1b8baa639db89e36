"""Parser of ``/v1/responses`` responses: typed events, and the response object.

A ``….delta`` event with a non-empty delta carries a token: text, reasoning, a refusal, arguments of a tool call. The
event that adds a tool call carries a token, too: the call's name, written by the model. Events that add a message or a
reasoning item, or repeat complete content (``….done``, ``response.completed``), carry no token; the last has the usage.
"""

from typing import Any

import msgspec

from wire.completion import Completion, add_usage
from wire.events import TokensDetails

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
FINISH_REASONS = {"completed": "stop", "max_output_tokens": "length", "in_progress": None, "queued": None}
"""Reasons and states of responses as finish reasons of OpenAI's completions. None: in progress."""


class ResponsesUsage(msgspec.Struct):
    """``usage`` of a response object: prompt, cached and output tokens."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: TokensDetails | None = None


class RawMessage(msgspec.Struct):
    """A prompt or output with token ids, which vLLM adds for ``enable_response_messages``."""

    tokens: list[int] | None = None


class ResponseObject(msgspec.Struct):
    """Response object without its output: status, usage, token ids."""

    model: str | None = None
    status: str | None = None
    usage: ResponsesUsage | None = None
    incomplete_details: dict[str, str | None] | None = None
    error: Any = None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None


class OutputPart(msgspec.Struct):
    """Content part of an output message."""

    type: str | None = None
    text: str | None = None


class OutputItem(msgspec.Struct):
    """Output item: a message, a tool call or reasoning."""

    type: str | None = None
    name: str | None = None
    content: list[OutputPart] | str | None = None


class ResponseBody(ResponseObject):
    """Complete response object, of a response that was not streamed."""

    output: list[OutputItem] | None = None


class ResponsesEvent(msgspec.Struct):
    """Streamed event."""

    type: str | None = None
    delta: Any = None
    item: OutputItem | None = None
    response: ResponseObject | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(ResponsesEvent).decode
_decode_body = msgspec.json.Decoder(ResponseBody).decode


def parse_responses_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a streamed event; return its number of tokens."""
    event = _decode_event(data)
    kind = event.type or ""
    if kind.endswith(".delta"):
        if kind == "response.output_text.delta" and isinstance(event.delta, str):
            texts.append(event.delta)
        return 1 if event.delta else 0
    if event.response is not None:
        add_response(completion, event.response)
    completion.done = completion.done or kind in ENDS
    if kind == "error" or event.error is not None:
        completion.error_kind = "stream_error"
    added = event.item if kind == "response.output_item.added" else None
    return 1 if added is not None and added.name else 0


def parse_response_body(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a complete body: usage and text, without token arrival times."""
    response = _decode_body(data)
    add_response(completion, response)
    for item in response.output or ():
        if item.type == "message" and isinstance(item.content, list):
            texts += [part.text for part in item.content if part.type == "output_text" and part.text]
    return 0


def add_response(completion: Completion, response: ResponseObject) -> None:
    """Set model, finish reason, usage and token ids of the response object; the last object is final."""
    if response.model is not None:
        completion.model = response.model
    if response.error is not None or response.status == "failed":
        completion.error_kind = "stream_error"
    reason = (response.incomplete_details or {}).get("reason") or response.status
    completion.finish_reason = FINISH_REASONS.get(reason or "", reason)
    if (usage := response.usage) is not None:
        add_usage(completion, usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
    completion.prompt_token_ids = _only_ids(response.input_messages) or completion.prompt_token_ids
    completion.token_ids = _only_ids(response.output_messages) or completion.token_ids


def _only_ids(messages: list[RawMessage] | None) -> list[int] | None:
    """Return the token ids of a single message; several messages are turns with tool calls, not one prompt."""
    return messages[0].tokens if messages is not None and len(messages) == 1 else None
