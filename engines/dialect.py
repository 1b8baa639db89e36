"""Dialect of an engine: fields, names and calls as its own source reads them; no engine gets the fields of another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import MAX_REPORTED, Engine

DialectName = Literal["vllm", "sglang", "llamacpp", "trtllm", "openai"]

COMPLETIONS_PATH = "/v1/completions"
MAX_TEXT_CHARS = 200
"""A longer version or model name is none."""
MAX_DIGITS = 15
USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
GREEDY: Mapping[str, Any] = {"temperature": 0}
"""Two runs of one workload get the same outputs as far as the engine can repeat them."""
PAST_ITS_END: Mapping[str, Any] = {"ignore_eos": True, **GREEDY}
WITH_IDS: Mapping[str, Any] = {**PAST_ITS_END, "return_token_ids": True}
NOT_IMPLEMENTED = 501
BOTH_LENGTHS = ("max_tokens", "min_tokens")

LoraFields = Callable[[str, str], dict[str, Any]]
"""Returns the fields that select an adapter, for the model's name and the adapter's; raises InputError."""


class Response(NamedTuple):
    """A control call's response."""

    status: int
    content: bytes
    refusal: str = ""
    """Error of a response for want of a key or a certificate, with the flag or variable to set. Empty: another."""
    date: str = ""
    """Its ``Date`` header. Empty: none."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    @property
    def status_text(self) -> str:
        return self.refusal or f"HTTP {self.status}"

    def failure(self, expected: str) -> str:
        """Return the error of a response without success."""
        return self.refusal or f"HTTP {self.status}; expected {expected}"


class Control(Protocol):
    """Control calls to one engine, off the data plane."""

    def text(self, path: str) -> str:
        """Return the body of a GET; empty on any failure."""

    def status(self, path: str) -> int | None:
        """Return the HTTP status of a GET; null: no response."""

    def post(self, path: str, body: bytes = b"") -> Response:
        """Return the response to a POST; raises InputError if the engine cannot be reached."""


def not_told(control: Control) -> bool | None:
    """Return null: no harmless call to this engine tells."""
    return None


def adapter_as_model(model: str, adapter: str) -> dict[str, Any]:
    """Return the adapter as a model of its own name."""
    return {"model": adapter}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Request fields, names and calls of one engine."""

    name: DialectName
    owner: str | None = None
    """``owned_by`` in the engine's own ``/v1/models``. Null: the engine is not recognised by it."""
    metric_prefix: str | None = None
    """Beginning of the engine's metric names. Null: the engine is not recognised by it."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Paths that only this engine serves, each with a key of the JSON object there."""
    read_settings: Callable[[Mapping[str, Any]], Engine] | None = None
    """Return the engine that the JSON object of ``pages`` tells of. Null: they tell no settings."""
    gauges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Metric names, newest first, of each gauge: running, waiting, kv_usage, prefix_queries, prefix_hits,
    preemptions. A name may be a sum: ``a + b``."""
    reset_cache: Callable[[Control], None] | None = None
    """Empty the prefix cache; raises InputError if that fails. Null: the engine has no call for it."""
    displace: Callable[[Control], None] | None = None
    """Move cached prompts to a tier that a reset may not reach, for the check of it. Null: the engine has none."""
    reset_hint: str = ""
    """Advice in the error for a cache that is not empty after its reset."""
    has_reset: Callable[[Control], bool | None] = not_told
    """Whether ``reset_cache`` would work, by a call that changes nothing. Null: not told."""
    reset_setting: str = ""
    """Setting of the engine that gives it the reset. Empty: none is needed, or known."""
    reports_cached: Callable[[Control], bool | None] = not_told
    """Whether usage has cached tokens, by a call that changes nothing. Null: not told before the first response."""
    cached_setting: str = ""
    """Setting of the engine with which usage has cached tokens. Empty: none is needed, or known."""
    injectable: frozenset[str] = frozenset()
    """Fields a proxy may add and remove again unseen: ``usage``, ``token-ids``."""
    tokenizes_content: bool = False
    """Whether ``/tokenize`` takes llama.cpp's fields instead of vLLM's."""
    path: str = COMPLETIONS_PATH
    """Where prompts of token ids go."""
    lengths: tuple[str, ...] = ("max_tokens",)
    """Fields for the number of tokens to generate, for each choice."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every such request."""
    asks_usage: bool = True
    """True: a stream has usage only where the request asks for it."""
    choices: str = "n"
    """The field for several outputs of one prompt."""
    priority: str | None = "priority"
    """Null: the engine has another scale of priorities than the trace."""
    prompt_logprobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields that ask for the prompt's log probabilities, in streams too. Empty: a stream has none."""
    lora: LoraFields = adapter_as_model
    lora_needs_map: bool = False
    """True: an adapter's name alone does not select it."""
    chat_lengths: tuple[str, ...] = ("max_tokens",)
    chat_constant: Mapping[str, Any] = field(default_factory=dict)
    chat_stream_without: frozenset[str] = frozenset()
    """Fields of ``chat_constant`` that a streamed chat must leave out."""
    responses_headroom: int = 0
    """Tokens by which an output of ``/v1/responses`` is shorter than ``max_output_tokens``."""
    exact_lengths: bool = True
    """True: the output's length can be set exactly."""
    returns_ids: bool = True
    """True: the response to a token-id prompt holds the output's ids."""

    def completion_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        """Return all fields but the prompt of a request for exactly ``tokens`` tokens, as far as the engine allows."""
        usage = USAGE if stream and self.asks_usage else {}
        return {"model": model, **dict.fromkeys(self.lengths, tokens), **self.constant, "stream": stream, **usage}

    def chat_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        without = self.chat_stream_without if stream else frozenset()
        constant = {name: value for name, value in self.chat_constant.items() if name not in without}
        usage = USAGE if stream else {}
        return {"model": model, **dict.fromkeys(self.chat_lengths, tokens), **constant, "stream": stream, **usage}

    def shape_fields(self, *, n: int | None, priority: int | None, prompt_logprobs: bool = False) -> dict[str, Any]:
        """Return the fields for the rest of a captured request's shape."""
        shape: dict[str, Any] = dict(self.prompt_logprobs) if prompt_logprobs else {}
        if n is not None:
            shape[self.choices] = n
        if priority is not None and self.priority is not None:
            shape[self.priority] = priority
        return shape


def post_reset(control: Control, path: str, expected: str, *, unsupported: str = "", body: bytes = b"") -> bytes:
    """Return the body of a successful POST; raises InputError naming ``expected``, or ``unsupported`` at HTTP 501."""
    response = control.post(path, body)
    if not response.is_success:
        expected = unsupported if unsupported and response.status == NOT_IMPLEMENTED else expected
        raise InputError(f"--reset-cache: POST {path} gave {response.failure(expected)}")
    return response.content


def decoded(text: str | bytes) -> Any:
    """Return a JSON text's value; null for any other text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def told_count(value: object) -> int | None:
    """Return a positive number that an engine told of itself; null: it is none."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 < value < MAX_REPORTED else None


def told_text(value: object) -> str | None:
    """Return a short text that an engine told of itself; null: it is none."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS and value.isprintable() else None


# Any other server of OpenAI's API: only documented fields, none of which sets an output's length exactly.
OPENAI = Dialect(
    "openai",
    constant=GREEDY,
    priority=None,
    injectable=frozenset({"usage"}),
    chat_constant=GREEDY,
    exact_lengths=False,
    returns_ids=False,
)
