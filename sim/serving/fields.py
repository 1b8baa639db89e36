"""Fields and messages of requests, decoded or refused by name; unknown fields are ignored."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from sim.serving.vocabulary import Message, Vocabulary
from tracefile.records.decoding import NOT_JSON

Shape = TypeVar("Shape")


class ApiError(Exception):
    """An error as vLLM words it."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return the response's JSON."""
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": detail})


class StreamOptions(msgspec.Struct, frozen=True):
    """Stream options of a request."""

    include_usage: bool | None = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that an output depends on, named as in OpenAI's completions."""

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
    """Any number: the prompt is not looked up in the prefix cache. The values themselves are not reported."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as sent."""

    role: str
    content: str | list[ContentPart] | None = None

    def joined(self) -> Message:
        """Return the message with its parts as one text. Raises ApiError for a part that is not text."""
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
    """Return the request in a body. Raises ApiError that names the field."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise ApiError(str(error)) from None
    except NOT_JSON as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def decode_prompts(raw: msgspec.Raw, vocabulary: Vocabulary) -> list[list[int]]:
    """Return the prompts as ids, from any of the four shapes. Raises ApiError for any other, or none."""
    try:
        decoded = msgspec.json.decode(raw)
        is_one = isinstance(decoded, str) or all(isinstance(token_id, int) for token_id in decoded)
        several = [decoded] if is_one else decoded
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
    """Raise ApiError for an id that is not in the vocabulary."""
    if token_ids and (max(token_ids) >= size or min(token_ids) < 0):
        raise ApiError(f"{param}: a token id is out of vocabulary; expected 0 … {size - 1}", param=param)
