"""Request shape: the recorded fields of a body. The prompt stays in memory until its blocks are hashed."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tap.ipc.messages import Endpoint
from tracefile.records.schema import MOST_TOKENS
from wire.jsonsize import fits_in_memory

MAX_NAME_CHARS = 200
"""Limit of recorded model and adapter names: a longer name may be a prompt."""

LIMITS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/completion": ("n_predict", "max_tokens"),
    "/infill": ("n_predict", "max_tokens"),
}
"""Fields of the output token limit by endpoint, in order of precedence. Other endpoints: ``max_tokens``."""

SESSION_FIELDS = frozenset({"session_id", "conversation", "user", "metadata"})

_decode = msgspec.json.Decoder().decode


class UnreadableBodyError(Exception):
    """The request body is not a JSON object, or too large once decoded; ``reason`` is counted."""

    def __init__(self, reason: str = "request_not_json") -> None:
        super().__init__(reason)
        self.reason = reason


class RequestShape(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded fields of a request (named as in ``Record``), and its body, which is never recorded."""

    endpoint: Endpoint
    body: dict[str, Any]
    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    priority: int | None = None
    tools: int | None = None
    """Number of tools. None: no tools."""
    n: int | None = None
    """Number of outputs. None: 1."""
    prompt_logprobs: bool | None = None
    """None: not requested."""
    cache_salt: str | None = None


def read_shape(endpoint: Endpoint, body: bytes) -> RequestShape:
    """Return the shape of a JSON body; a field of the wrong type reads as absent. Raises UnreadableBodyError."""
    if not fits_in_memory(body):
        raise UnreadableBodyError("request_too_complex")
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UnreadableBodyError from None
    if not isinstance(fields, dict):
        raise UnreadableBodyError
    tools = fields.get("tools")
    choices = _count(_integer(fields, "n" if "n" in fields else "n_cmpl"), least=1)
    return RequestShape(
        endpoint=endpoint,
        body=fields,
        model=short_name(fields.get("model")),
        stream=fields.get("stream") is True,
        max_tokens=_count(_limit(endpoint, fields), least=0),
        priority=_integer(fields, "priority"),
        tools=len(tools) if isinstance(tools, list) and tools else None,
        n=None if choices == 1 else choices,
        prompt_logprobs=_asks_prompt_logprobs(endpoint, fields) or None,
        cache_salt=_text(fields, "cache_salt"),
    )


def explicit_session(headers: Mapping[str, str], shape: RequestShape | None) -> str | None:
    """Return the client's session id, in order of precedence (header names in lower case)."""
    if headers.get("x-session-id"):
        return headers["x-session-id"]
    if shape is not None and not SESSION_FIELDS.isdisjoint(shape.body):
        for value in _session_names(shape.body):
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)
    return headers.get("x-dynamo-session-id") or None


def _session_names(body: Mapping[str, Any]) -> Sequence[object]:
    """Return session ids of the body; Responses has ``conversation``, Anthropic ``metadata.user_id``."""
    metadata, conversation = body.get("metadata"), body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    names = (body.get("session_id"), conversation, body.get("user"))
    if not isinstance(metadata, dict):
        return names
    return (*names, metadata.get("session_id"), metadata.get("user_id"))


def short_name(value: object) -> str | None:
    """Return a name if it is short and has no control characters, which a terminal would execute."""
    return value if isinstance(value, str) and len(value) <= MAX_NAME_CHARS and value.isprintable() else None


def token_ids(value: object) -> Sequence[int] | None:
    """Return ``value`` as token ids (u32) if it is a non-empty list of token ids, else None."""
    if not isinstance(value, list) or not value:
        return None
    try:
        return array("I", value)
    except (TypeError, OverflowError):
        return None


def _limit(endpoint: Endpoint, fields: Mapping[str, Any]) -> int | None:
    for name in LIMITS.get(endpoint, ("max_tokens",)):
        limit = _integer(fields, name)
        if limit is not None:
            return None if name == "n_predict" and limit < 0 else limit  # llama.cpp: negative means no limit
    return None


def _count(value: int | None, *, least: int) -> int | None:
    return value if value is not None and least <= value <= MOST_TOKENS else None


def _asks_prompt_logprobs(endpoint: Endpoint, fields: Mapping[str, Any]) -> bool:
    """Return whether prompt log probabilities are requested, by name or by ``echo``, as in vLLM."""
    if _integer(fields, "prompt_logprobs") is not None:
        return True
    if fields.get("echo") is not True:
        return False
    return endpoint == "/v1/chat/completions" or _integer(fields, "logprobs") is not None


def _integer(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and abs(value) < 1 << 53 else None


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value else None
