"""Fields and messages of requests, decoded or rejected by name; unknown fields are ignored."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from sim.serving.vocabulary import Message, Vocabulary
from tracefile.records.decoding import NOT_JSON

Shape = TypeVar("Shape")


class ApiError(Exception):
    """Error with vLLM's wording."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": detail})


class StreamOptions(msgspec.Struct, frozen=True):
    """Stream options of a request."""

    include_usage: bool | None = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that determine an output, named as in the OpenAI API."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    user: str | None = None
    prompt_logprobs: int | None = None
    """A number disables prefix cache hits of the prompt. No logprobs are returned."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Content part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Chat message of a request."""

    role: str
    content: str | list[ContentPart] | None = None

    def joined(self) -> Message:
        """Return the message with its content parts as one text. Raises ApiError for a part that is not text."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        for part in parts:
            if part.text is None:
                raise ApiError(f"a content part of type {part.type!r}: this engine reads text", param="messages")
        text = self.content if isinstance(self.content, str) else "".join(part.text or "" for part in parts)
        return Message(role=self.role, text=text)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


def decode_body(body: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise ApiError(str(error)) from None
    except NOT_JSON as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def decode_prompts(raw: msgspec.Raw, vocabulary: Vocabulary) -> list[list[int]]:
    """Return the prompts as token ids, from any of the four shapes. Raises ApiError for other shapes."""
    try:
        decoded = msgspec.json.decode(raw)
        is_single = isinstance(decoded, str) or all(isinstance(token_id, int) for token_id in decoded)
        several = [decoded] if is_single else decoded
        is_text = all(isinstance(prompt, str) for prompt in several)
        prompts = list(map(vocabulary.encode, several)) if is_text else msgspec.convert(several, list[list[int]])
    except (*NOT_JSON, TypeError):
        raise ApiError("prompt: expected a text, a list of token ids, or a list of either", param="prompt") from None
    if not prompts or not all(prompts):
        raise ApiError("prompt: must not be empty", param="prompt")
    for prompt in prompts:
        check_ids(prompt, vocabulary.size, "prompt")
    return prompts


def check_ids(token_ids: Sequence[int], size: int, param: str) -> None:
    if token_ids and (max(token_ids) >= size or min(token_ids) < 0):
        raise ApiError(f"{param}: a token id is out of vocabulary; expected 0 … {size - 1}", param=param)
