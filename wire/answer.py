"""Responses of all APIs: the endpoint selects the function that reads tokens from the body.

llama.cpp's own API is read here: its OpenAI endpoints give no token ids, so prompts of ids go to ``/completion``. A
stream ends with the event that says ``stop``; no ``[DONE]`` follows. A token within a character waits for the rest of
it, and its id is then not sent: where the ids are fewer than the tokens that were made, they are dropped.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from wire.completion import Completion, EventTaker, parse_stream, parse_whole, take_data
from wire.events import Timings, token_count
from wire.messages_events import take_messages_event, take_whole_message
from wire.responses_events import take_responses_event, take_whole_response

LLAMA_CPP = frozenset({"/completion", "/infill"})
"""Endpoints of llama.cpp's own API."""
GENERATING = LLAMA_CPP | {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
"""Endpoints that answer with tokens, and say when they are done."""

FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}
"""``stop_type`` in the completions' words."""


class NativeEvent(msgspec.Struct):
    """Streamed event, or a whole response."""

    index: int | None = 0
    content: str | None = None
    tokens: list[int] | None = None
    stop: bool | None = None
    stop_type: str | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    """The prompt's tokens, cached ones included."""
    timings: Timings | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(NativeEvent).decode
_decode_body = msgspec.json.Decoder(NativeEvent | list[NativeEvent]).decode


def take_native_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Add one streamed event to what is known; returns how many tokens it carried."""
    return _take(completion, _decode_event(data), texts)


def take_whole_native(completion: Completion, data: bytes, texts: list[str]) -> int:
    """The same for an answer that came in one piece: an object, or a list of them where several were asked for."""
    found = _decode_body(data)
    return sum(_take(completion, event, texts) for event in (found if isinstance(found, list) else [found]))


def _take(completion: Completion, event: NativeEvent, texts: list[str]) -> int:
    if event.error is not None:
        completion.error_kind = "stream_error"
    completion.model = event.model or completion.model
    tokens = event.tokens or []
    if not event.index:
        texts.append(event.content or "")
        if tokens:
            completion.add_token_ids(tokens)
    if event.stop:
        _take_end(completion, event)
    return len(tokens) or bool(event.content)


def _take_end(completion: Completion, event: NativeEvent) -> None:
    completion.done = True
    completion.prompt_tokens = token_count(event.tokens_evaluated)
    if event.timings is not None:
        completion.cached_tokens = token_count(event.timings.cache_n)
    made = token_count(event.tokens_predicted)
    if made is not None:
        completion.output_tokens = (completion.output_tokens or 0) + made
    if not event.index:
        completion.finish_reason = FINISH_REASONS.get(event.stop_type or "", event.stop_type)
        if completion.token_ids is not None and len(completion.token_ids) != made:
            completion.token_ids = None


TAKERS: dict[str, tuple[EventTaker, EventTaker]] = {
    **dict.fromkeys(LLAMA_CPP, (take_native_event, take_whole_native)),
    "/v1/responses": (take_responses_event, take_whole_response),
    "/v1/messages": (take_messages_event, take_whole_message),
}
"""Takers of a streamed event and of a whole body."""


def parse_answer(endpoint: str, reads: Sequence[tuple[int, bytes]], *, stream: bool) -> Completion:
    """Read the body of a response on ``endpoint``, whole or cut short. Never raises: ``error_kind`` says what is wrong.

    ``reads``: as of ``parse_stream``, when and what.
    An endpoint that is not known is read as OpenAI's completions: most other APIs share its usage and its errors.
    """
    take_event, take_body = TAKERS.get(endpoint, (take_data, take_data))
    if stream:
        return parse_stream(reads, take_event)
    return parse_whole(reads[0][1] if len(reads) == 1 else b"".join(data for _, data in reads), take_body)
