"""Responses of ``/v1/responses``: typed events, each with its kind, and the response object itself.

Any ``….delta`` event with a non-empty delta carries a token: text, reasoning, a refusal, a call's arguments. So does
the event that adds a call to the output, since it holds the call's name, which the model wrote; one that adds a message
or a reasoning item holds nothing yet. The events that repeat what is complete (``….done``, ``response.completed``)
carry none; the latter has the usage.
"""

from typing import Any

import msgspec

from wire.completion import Completion, take_usage
from wire.events import TokensDetails

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
FINISH_REASONS = {"completed": "stop", "max_output_tokens": "length", "in_progress": None, "queued": None}
"""Reasons and states of responses in the completions' words. Null: it goes on."""


class ResponsesUsage(msgspec.Struct):
    """``usage`` of a response object."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: TokensDetails | None = None


class RawMessage(msgspec.Struct):
    """A prompt or an answer with its token ids, as vLLM adds them where ``enable_response_messages`` asks for it."""

    tokens: list[int] | None = None


class ResponseObject(msgspec.Struct):
    """A response, without its output."""

    model: str | None = None
    status: str | None = None
    usage: ResponsesUsage | None = None
    incomplete_details: dict[str, str | None] | None = None
    error: Any = None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None


class OutputPart(msgspec.Struct):
    """A part of an output message."""

    type: str | None = None
    text: str | None = None


class OutputItem(msgspec.Struct):
    """Item of the output: a message, a call, reasoning."""

    type: str | None = None
    name: str | None = None
    content: list[OutputPart] | str | None = None


class WholeResponse(ResponseObject):
    """A response that was not streamed."""

    output: list[OutputItem] | None = None


class ResponsesEvent(msgspec.Struct):
    """Streamed event."""

    type: str | None = None
    delta: Any = None
    item: OutputItem | None = None
    response: ResponseObject | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(ResponsesEvent).decode
_decode_whole = msgspec.json.Decoder(WholeResponse).decode


def take_responses_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of one streamed event."""
    event = _decode_event(data)
    kind = event.type or ""
    if kind.endswith(".delta"):
        if kind == "response.output_text.delta" and isinstance(event.delta, str):
            texts.append(event.delta)
        return 1 if event.delta else 0
    if event.response is not None:
        take_response(completion, event.response)
    completion.done = completion.done or kind in ENDS
    if kind == "error" or event.error is not None:
        completion.error_kind = "stream_error"
    added = event.item if kind == "response.output_item.added" else None
    return 1 if added is not None and added.name else 0


def take_whole_response(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The taker of a whole body."""
    response = _decode_whole(data)
    take_response(completion, response)
    for item in response.output or ():
        if item.type == "message" and isinstance(item.content, list):
            texts += [part.text for part in item.content if part.type == "output_text" and part.text]
    return 0


def take_response(completion: Completion, response: ResponseObject) -> None:
    """Take the response object's own account; the last one counts."""
    if response.model is not None:
        completion.model = response.model
    if response.error is not None or response.status == "failed":
        completion.error_kind = "stream_error"
    reason = (response.incomplete_details or {}).get("reason") or response.status
    completion.finish_reason = FINISH_REASONS.get(reason or "", reason)
    if (usage := response.usage) is not None:
        take_usage(completion, usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
    completion.prompt_token_ids = _only_ids(response.input_messages) or completion.prompt_token_ids
    completion.token_ids = _only_ids(response.output_messages) or completion.token_ids


def _only_ids(messages: list[RawMessage] | None) -> list[int] | None:
    """Ids of a prompt or answer in one message; more than one are turns with tools between, and no single prompt."""
    return messages[0].tokens if messages is not None and len(messages) == 1 else None
