"""OpenAI's completion and chat shapes as vLLM 0.32 speaks them: requests in, errors, chunks and responses out.

Unknown fields are ignored, as there. With several prompts in a request vLLM reports one prompt's cached tokens; here
they are summed, as prompt tokens are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from sim.vocabulary import Message, Vocabulary

Shape = TypeVar("Shape")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for ``/v1/completions``; a chat's answer may fill the context."""


class ApiError(Exception):
    """An error in OpenAI's shape."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The response's JSON."""
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": detail})


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside its chunks."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    n: int | None = 1
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    priority: int | None = 0


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``/v1/completions``; the prompt is a text, ids, or a list of either."""

    prompt: msgspec.Raw
    echo: bool | None = False


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as sent."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None

    def joined(self) -> Message:
        """The message with its parts as one text. Raises ApiError for a part that is not text."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.text is None:
                    raise ApiError(f"a content part of type {part.type!r}: this engine reads text", param="messages")
            text = "".join(part.text or "" for part in self.content)
        else:
            text = self.content or ""
        return Message(role=self.role, text=text, tool_calls=tuple(self.tool_calls or ()))


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class Usage(NamedTuple):
    """Token counts of a request, over its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None: not to be told (in the middle of a stream)."""

    def fields(self) -> dict[str, Any]:
        """The ``usage`` object."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return counts


class Delta(NamedTuple):
    """What one choice gained since its last chunk."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_token_ids: Sequence[int] | None
    """With the choice's first delta, if the client asked for ids; else None."""


def decode_body(body: bytes, shape: type[Shape]) -> Shape:
    """The request in a body. Raises ApiError that names the field."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise ApiError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def decode_prompts(raw: msgspec.Raw, vocabulary: Vocabulary) -> list[list[int]]:
    """The prompts as ids, from any of the four shapes. Raises ApiError for any other, or none."""
    data = bytes(raw)
    inner = data.lstrip()[1:].lstrip()[:1] if data[:1] == b"[" else b""
    try:
        if data[:1] == b'"':
            prompts = [vocabulary.encode(msgspec.json.decode(data, type=str))]
        elif inner == b'"':
            prompts = [vocabulary.encode(text) for text in msgspec.json.decode(data, type=list[str])]
        elif inner == b"[":
            prompts = msgspec.json.decode(data, type=list[list[int]])
        else:
            prompts = [msgspec.json.decode(data, type=list[int])]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError("prompt: expected a text, a list of token ids, or a list of either", param="prompt") from None
    if not prompts or not all(prompts):
        raise ApiError("prompt: must not be empty", param="prompt")
    for prompt in prompts:
        check_ids(prompt, vocabulary.size, "prompt")
    return prompts


def check_ids(token_ids: Sequence[int], size: int, param: str) -> None:
    """Raise ApiError for an id that is not in the vocabulary."""
    if token_ids and (max(token_ids) >= size or min(token_ids) < 0):
        raise ApiError(f"{param}: a token id is out of vocabulary; expected 0 … {size - 1}", param=param)


def completion_chunk(head: bytes, delta: Delta, *, with_ids: bool, usage: Usage | None = None) -> bytes:
    """A chunk of ``/v1/completions``: one SSE event. ``head`` is ``chunk_head``'s."""
    choice = {
        "index": delta.choice,
        "text": delta.text,
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "stop_reason": None,
        "prompt_token_ids": delta.prompt_token_ids,
        "token_ids": delta.token_ids if with_ids else None,
    }
    return _event(head, {"choices": [choice]}, usage)


def chat_chunk(head: bytes, delta: Delta, *, with_ids: bool, usage: Usage | None = None) -> bytes:
    """A chunk of ``/v1/chat/completions`` that carries text."""
    choice: dict[str, Any] = {
        "index": delta.choice,
        "delta": {"content": delta.text},
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "token_ids": delta.token_ids if with_ids else None,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = None
    return _event(head, {"choices": [choice]}, usage)


def role_chunk(head: bytes, delta: Delta, *, usage: Usage | None = None) -> bytes:
    """A choice's first chunk in a chat: the role, no token, and the prompt's ids where they are wanted."""
    choice = {
        "index": delta.choice,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    return _event(head, {"choices": [choice], "prompt_token_ids": delta.prompt_token_ids}, usage)


def usage_chunk(head: bytes, usage: Usage) -> bytes:
    """The last event but ``[DONE]`` of a stream that was asked for usage."""
    return _event(head, {"choices": []}, usage)


def chunk_head(response_id: str, kind: str, created_s: int, model: str) -> bytes:
    """What every event of a stream begins with, made once."""
    fields = {"id": response_id, "object": kind, "created": created_s, "model": model}
    return b"data: " + msgspec.json.encode(fields)[:-1] + b","


def completion_choice(delta: Delta, *, with_ids: bool) -> dict[str, Any]:
    """A choice of an unstreamed completion; ``delta`` holds all of it."""
    return {
        "index": delta.choice,
        "text": delta.text,
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "stop_reason": None,
        "token_ids": delta.token_ids if with_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": delta.prompt_token_ids,
    }


def chat_choice(delta: Delta, *, with_ids: bool) -> dict[str, Any]:
    """A choice of an unstreamed chat completion."""
    return {
        "index": delta.choice,
        "message": {"role": "assistant", "content": delta.text, "refusal": None, "reasoning": None},
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "stop_reason": None,
        "token_ids": delta.token_ids if with_ids else None,
    }


def _event(head: bytes, fields: dict[str, Any], usage: Usage | None) -> bytes:
    if usage is not None:
        fields["usage"] = usage.fields()
    return head + msgspec.json.encode(fields)[1:] + b"\n\n"
