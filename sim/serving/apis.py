"""``/v1/completions`` and ``/v1/chat/completions`` as in vLLM 0.32; cached tokens are the total of all prompts."""

from typing import Any, NamedTuple

import msgspec

from sim.serving.fields import ApiError, ChatMessage, GenerationFields, decode_body, decode_prompts
from sim.serving.output import FinishReason, Generation
from sim.serving.service import PlannedRequest, Service
from sim.serving.vocabulary import Vocabulary

DEFAULT_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class Usage(NamedTuple):
    """Token counts of a request, over its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Delta(NamedTuple):
    """New tokens of a choice since the last event: ``start`` to ``stop`` of its output."""

    generation: Generation
    start: int
    stop: int
    finish_reason: FinishReason | None

    @property
    def token_ids(self) -> list[int]:
        return self.generation.output.token_ids[self.start : self.stop]

    def text(self, vocabulary: Vocabulary) -> str:
        """Text of the tokens, without the stop token."""
        return vocabulary.decode(self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids)


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of a completion request; the prompt is text, token ids, or a list of either."""

    prompt: msgspec.Raw


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of a chat completion request."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = True


def read_completion(service: Service, body: bytes) -> PlannedRequest:
    """Decode a completion request to prompt tokens. Raises ApiError."""
    request = decode_body(body, CompletionRequest)
    max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    return PlannedRequest(request, decode_prompts(request.prompt, service.vocabulary), max_tokens)


def read_chat(service: Service, body: bytes) -> PlannedRequest:
    """Decode a chat completion request to prompt tokens. Raises ApiError."""
    request = decode_body(body, ChatRequest)
    if not request.messages:
        raise ApiError("messages: must not be empty", param="messages")
    messages = [message.joined() for message in request.messages]
    generation_prompt = request.add_generation_prompt is not False
    prompt = service.vocabulary.render_chat(messages, generation_prompt=generation_prompt)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return PlannedRequest(request, [prompt], max_tokens)


class CompletionEncoder:
    """Encoder of a completion. Streamed deltas are complete server-sent events."""

    id_prefix, chunk, response_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, request: PlannedRequest, response_id: str, created_s: int) -> None:
        self._vocabulary, self._request = service.vocabulary, request
        self._fields = {"id": response_id, "object": self.chunk, "created": created_s, "model": service.model_name}
        self._head = b"data: " + msgspec.json.encode(self._fields)[:-1] + b","
        self._with_ids = bool(request.fields.return_token_ids)

    def delta(self, delta: Delta) -> bytes:
        return self._event({"choices": [self._choice(delta)]})

    def closing(self, usage: Usage) -> bytes:
        options = self._request.fields.stream_options
        reported = options is not None and bool(options.include_usage)
        return (self._event({"choices": [], "usage": usage.fields()}) if reported else b"") + DONE

    def response(self, deltas: list[Delta], usage: Usage) -> bytes:
        """Return the unstreamed response; a delta with all tokens per choice."""
        choices = [self._choice(delta) for delta in deltas]
        fields = {**self._fields, "object": self.response_object, "choices": choices, "usage": usage.fields()}
        return msgspec.json.encode(fields | self._prompt_ids())

    def _prompt_ids(self) -> dict[str, Any]:
        return {}

    def _event(self, fields: dict[str, Any]) -> bytes:
        return self._head + msgspec.json.encode(fields)[1:] + b"\n\n"

    def _choice(self, delta: Delta) -> dict[str, Any]:
        index = delta.generation.index
        prompt = self._request.prompts[index // self._request.choices]
        return {
            "index": index,
            "text": delta.text(self._vocabulary),
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": prompt if self._with_ids and delta.start == 0 else None,
            "token_ids": delta.token_ids if self._with_ids else None,
        }


class ChatEncoder(CompletionEncoder):
    """Encoder of a chat completion."""

    id_prefix, chunk, response_object = "chatcmpl-", "chat.completion.chunk", "chat.completion"

    def delta(self, delta: Delta) -> bytes:
        role = b"" if delta.start else self._role(delta.generation.index)
        text = {"delta": {"content": delta.text(self._vocabulary)}}
        return role + self._event({"choices": [self._with_text(delta, text)]})

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._request.prompts[0] if self._with_ids else None}

    def _role(self, index: int) -> bytes:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        prompt_ids = self._request.prompts[0] if self._with_ids and index == 0 else None
        return self._event({"choices": [choice], "prompt_token_ids": prompt_ids})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text(self._vocabulary), "refusal": None, "reasoning": None}
        return self._with_text(delta, {"message": message})

    def _with_text(self, delta: Delta, text: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.generation.index,
            **text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids if self._with_ids else None,
        }
