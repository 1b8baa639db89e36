"""Parser selection by endpoint: each API's parser counts the tokens of an event, for TTFT and ITL.

llama.cpp's native API is parsed here: its OpenAI endpoints return no token ids, so prompts of token ids are sent to
``/completion``. A stream ends with an event with ``stop``, without ``[DONE]``. A token within a UTF-8 character is sent
with the next token, without its id: if there are fewer ids than generated tokens, the ids are dropped.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from wire.completion import Completion, EventParser, parse_body, parse_completions_event, parse_stream
from wire.events import Timings, token_count
from wire.messages_events import parse_message_body, parse_messages_event
from wire.responses_events import parse_response_body, parse_responses_event

LLAMA_CPP = frozenset({"/completion", "/infill"})
"""Endpoints of llama.cpp's native API."""
GENERATING = LLAMA_CPP | {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
"""Endpoints whose responses have tokens and an explicit end."""

FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}
"""llama.cpp's ``stop_type`` as finish reasons of OpenAI's completions."""


class NativeEvent(msgspec.Struct):
    """Streamed event of llama.cpp, or a complete response, with token ids and timings."""

    index: int | None = 0
    content: str | None = None
    tokens: list[int] | None = None
    stop: bool | None = None
    stop_type: str | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    """Prompt tokens, cached tokens included."""
    timings: Timings | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(NativeEvent).decode
_decode_body = msgspec.json.Decoder(NativeEvent | list[NativeEvent]).decode


def parse_native_event(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a streamed event; return its number of tokens."""
    return _add_event(completion, _decode_event(data), texts)


def parse_native_body(completion: Completion, data: bytes, texts: list[str]) -> int:
    """Parse a complete body: an object, or a list of objects for several outputs; return its number of tokens."""
    body = _decode_body(data)
    return sum(_add_event(completion, event, texts) for event in (body if isinstance(body, list) else [body]))


def _add_event(completion: Completion, event: NativeEvent, texts: list[str]) -> int:
    if event.error is not None:
        completion.error_kind = "stream_error"
    completion.model = event.model or completion.model
    tokens = event.tokens or []
    if not event.index:
        texts.append(event.content or "")
        if tokens:
            completion.add_token_ids(tokens)
    if event.stop:
        _add_end(completion, event)
    return len(tokens) or bool(event.content)


def _add_end(completion: Completion, event: NativeEvent) -> None:
    completion.done = True
    completion.prompt_tokens = token_count(event.tokens_evaluated)
    if event.timings is not None:
        completion.cached_tokens = token_count(event.timings.cache_n)
    generated = token_count(event.tokens_predicted)
    if generated is not None:
        completion.output_tokens = (completion.output_tokens or 0) + generated
    if not event.index:
        completion.finish_reason = FINISH_REASONS.get(event.stop_type or "", event.stop_type)
        if completion.token_ids is not None and len(completion.token_ids) != generated:
            completion.token_ids = None


EVENT_PARSERS: dict[str, tuple[EventParser, EventParser]] = {
    **dict.fromkeys(LLAMA_CPP, (parse_native_event, parse_native_body)),
    "/v1/responses": (parse_responses_event, parse_response_body),
    "/v1/messages": (parse_messages_event, parse_message_body),
}
"""Parsers of a streamed event and of a complete body, by endpoint."""


def parse_answer(endpoint: str, reads: Sequence[tuple[int, bytes]], *, stream: bool) -> Completion:
    """Parse tokens, usage and first token time of a response on ``endpoint``. Never raises: see ``error_kind``.

    ``reads``: arrival times and bytes, as for ``parse_stream``.
    Unknown endpoints are parsed as OpenAI's completions: most other APIs share its usage and errors.
    """
    add_event, parse_body_event = EVENT_PARSERS.get(endpoint, (parse_completions_event, parse_completions_event))
    if stream:
        return parse_stream(reads, add_event)
    return parse_body(reads[0][1] if len(reads) == 1 else b"".join(data for _, data in reads), parse_body_event)
