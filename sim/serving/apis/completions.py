"""``/v1/completions`` as vLLM 0.32 speaks it.

With several prompts in a request vLLM reports one prompt's cached tokens; here they are summed, as prompt tokens are.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from sim.serving.apis.voice import Delta, Usage
from sim.serving.engine.service import Service
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import Asked, GenerationFields, check_top_logprobs, decode_body, decode_prompts
from sim.serving.requests.logprobs import completion_logprobs
from sim.serving.requests.vocabulary import Spelling

DEFAULT_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body; the prompt is a text, ids, or a list of either."""

    prompt: msgspec.Raw
    logprobs: int | None = None


class Completions:
    """The API."""

    id_prefix = "cmpl-"

    def read(self, service: Service, body: bytes) -> Asked:
        request = decode_body(body, CompletionRequest)
        service.check_model(request.model)
        prompts = decode_prompts(request.prompt, service.vocabulary)
        max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        top = check_top_logprobs(request.logprobs)
        return Asked(fields=request, prompts=prompts, max_tokens=max_tokens, top_logprobs=top)

    def voice(self, service: Service, asked: Asked, response_id: str, created_s: int) -> "CompletionVoice":
        return CompletionVoice(service, asked, response_id, created_s)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class CompletionVoice:
    """Words one response."""

    def __init__(self, service: Service, asked: Asked, response_id: str, created_s: int) -> None:
        self._vocabulary, self._spelling = service.vocabulary, service.spelling
        self._asked = asked
        self._fields = {
            "id": response_id,
            "object": "text_completion",
            "created": created_s,
            "model": service.model_name,
        }
        self._head = chunk_head(self._fields)
        self._with_ids = bool(asked.fields.return_token_ids)
        self._choices = asked.fields.n or 1
        self._offsets: dict[int, int] = {}
        """Characters said so far of each choice, where logprobs ask for it."""

    def opening(self) -> bytes:
        return b""

    def tokens(self, place: int, token_ids: Sequence[int]) -> list[bytes]:
        if self._asked.top_logprobs is not None:
            return []
        before = b'%b"choices":[{"index":%d,"text":' % (self._head, place)
        after = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":'
        return worded_tokens(before, after, token_ids, self._spelling, with_ids=self._with_ids)

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        choice = self._choice(delta)
        del choice["prompt_logprobs"]
        return event(self._head, {"choices": [choice]}, usage)

    def closing(self, usage: Usage) -> bytes:
        return closing(self._head, self._asked, usage)

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        choices = [self._choice(delta) for delta in deltas]
        return msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.fields()})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        place = delta.generation.place
        text = delta.text(self._vocabulary)
        logprobs = None
        if self._asked.top_logprobs is not None:
            offset = self._offsets.get(place, 0)
            self._offsets[place] = offset + len(text)
            logprobs = completion_logprobs(
                self._vocabulary, delta.token_ids, delta.start, offset, self._asked.top_logprobs
            )
        first = self._with_ids and delta.start == 0
        return {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": None,
            "token_ids": delta.token_ids if self._with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._asked.prompts[place // self._choices] if first else None,
        }


def chunk_head(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields)[:-1] + b","


def worded_tokens(
    before: bytes, after: bytes, token_ids: Sequence[int], spelling: Spelling, *, with_ids: bool
) -> list[bytes]:
    """An event for each token: its text stands behind ``before``, and its id behind ``after`` if that is told."""
    if with_ids:
        return [b"%b%b%b[%d]}]}\n\n" % (before, spelling[token_id], after, token_id) for token_id in token_ids]
    after += b"null}]}\n\n"
    return [before + spelling[token_id] + after for token_id in token_ids]


def event(head: bytes, fields: dict[str, Any], usage: Usage | None) -> bytes:
    """A chunk: one server-sent event. ``head`` is ``chunk_head``'s."""
    if usage is not None:
        fields["usage"] = usage.fields()
    return head + msgspec.json.encode(fields)[1:] + b"\n\n"


def closing(head: bytes, asked: Asked, usage: Usage) -> bytes:
    options = asked.fields.stream_options
    told = options is not None and bool(options.include_usage)
    return (event(head, {"choices": []}, usage) if told else b"") + DONE
