"""Responses of all APIs: the endpoint selects the module that reads tokens from the body."""

from collections.abc import Sequence

from wire.completion import Completion, EventTaker, parse_stream, parse_whole, take_data
from wire.llamacpp_events import take_native_event, take_whole_native
from wire.messages_events import messages_event_taker, take_whole_message
from wire.responses_events import take_responses_event, take_whole_response

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Endpoints that answer with tokens, and say when they are done."""
LLAMA_CPP = "/completion"
"""llama.cpp's own endpoint, beside the OpenAI ones."""


def parse_answer(endpoint: str, reads: Sequence[tuple[int, bytes]], *, stream: bool) -> Completion:
    """Read the body of a response on ``endpoint``, whole or cut short. Never raises: ``error_kind`` says what is wrong.

    ``reads``: as in ``BodyRead``, when and what.
    An endpoint that is not known is read as OpenAI's completions: most other APIs share its usage and its errors.
    """
    if stream:
        return parse_stream(reads, _event_taker(endpoint))
    body = reads[0][1] if len(reads) == 1 else b"".join(data for _, data in reads)
    return parse_whole(body, _body_taker(endpoint))


def _event_taker(endpoint: str) -> EventTaker:
    if endpoint == "/v1/messages":
        return messages_event_taker()
    if endpoint == LLAMA_CPP:
        return take_native_event
    return take_responses_event if endpoint == "/v1/responses" else take_data


def _body_taker(endpoint: str) -> EventTaker:
    if endpoint == "/v1/messages":
        return take_whole_message
    if endpoint == LLAMA_CPP:
        return take_whole_native
    return take_whole_response if endpoint == "/v1/responses" else take_data
