"""Dialect of an engine: request fields, metric names and control calls, as in the engine's source code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import MAX_REPORTED, Engine

DialectName = Literal["vllm", "sglang", "llamacpp", "trtllm", "openai"]

COMPLETIONS_PATH = "/v1/completions"
MAX_TEXT_CHARS = 200
"""Limit of a version or model name; longer texts are ignored."""
MAX_DIGITS = 15
USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
GREEDY: Mapping[str, Any] = {"temperature": 0}
"""Greedy decoding: two runs of a workload get equal outputs, as far as the engine is deterministic."""
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True, **GREEDY}
WITH_IDS: Mapping[str, Any] = {**IGNORE_EOS, "return_token_ids": True}
NOT_IMPLEMENTED = 501
BOTH_LENGTHS = ("max_tokens", "min_tokens")

LoraFields = Callable[[str, str], dict[str, Any]]
"""Maps the names of a model and an adapter to the request fields that select the adapter; raises InputError."""


class Response(NamedTuple):
    """Response of a control call."""

    status: int
    content: bytes
    refusal: str = ""
    """Error for a missing key or certificate, with the flag or variable to set. Empty: not refused."""
    date: str = ""
    """``Date`` header. Empty: absent."""

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
        """Return the error message of an unsuccessful response."""
        return self.refusal or f"HTTP {self.status}; expected {expected}"


class Control(Protocol):
    """Control calls to one engine, off the data plane."""

    def text(self, path: str) -> str:
        """Return the body of a GET; empty on any failure."""

    def status(self, path: str) -> int | None:
        """Return the HTTP status of a GET; None: no response."""

    def post(self, path: str, body: bytes = b"") -> Response:
        """Return the response to a POST; raises InputError if the engine cannot be reached."""


def not_reported(control: Control) -> bool | None:
    """Return None: no call reports it without changing the prefix cache."""
    return None


def adapter_as_model(model: str, adapter: str) -> dict[str, Any]:
    """Return fields that select the adapter as a model name."""
    return {"model": adapter}


@dataclass(frozen=True, slots=True)
class Dialect:
    """An engine's request fields for exact token counts, metric names, prefix cache reset and token-id support."""

    name: DialectName
    owner: str | None = None
    """``owned_by`` in the engine's ``/v1/models``. None: not used for detection."""
    metric_prefix: str | None = None
    """Prefix of the engine's metric names. None: not used for detection."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Paths that only this engine serves, with a key of their JSON object."""
    read_settings: Callable[[Mapping[str, Any]], Engine] | None = None
    """Returns the engine settings in the JSON object of ``pages``. None: the pages have no settings."""
    gauges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Metric names, newest first, of each gauge: running, waiting, kv_usage, prefix_queries, prefix_hits,
    preemptions. A formula may be a sum: ``a + b``."""
    reset_cache: Callable[[Control], None] | None = None
    """Resets the prefix cache; raises InputError on failure. None: the engine has no reset."""
    displace: Callable[[Control], None] | None = None
    """Moves cached prompts to a tier that a reset may not reach, to check the reset. None: no such tier."""
    reset_hint: str = ""
    """Advice in the error for a prefix cache that is not empty after its reset."""
    has_reset: Callable[[Control], bool | None] = not_reported
    """Returns whether ``reset_cache`` would work, by a read-only call. None: not reported."""
    reset_setting: str = ""
    """Engine setting that enables the reset. Empty: none is needed, or known."""
    reports_cached: Callable[[Control], bool | None] = not_reported
    """Returns whether usage has cached tokens, by a read-only call. None: unknown before the first response."""
    cached_setting: str = ""
    """Engine setting that adds cached tokens to usage. Empty: none is needed, or known."""
    injectable: frozenset[str] = frozenset()
    """Response fields that a proxy can request and remove transparently: ``usage``, ``token-ids``."""
    tokenizes_content: bool = False
    """True: ``/tokenize`` takes llama.cpp's fields instead of vLLM's."""
    path: str = COMPLETIONS_PATH
    """Endpoint for prompts of token ids."""
    lengths: tuple[str, ...] = ("max_tokens",)
    """Fields for the number of output tokens of each choice."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """Constant fields of these requests."""
    asks_usage: bool = True
    """True: a stream has usage only if the request has ``stream_options``."""
    choices: str = "n"
    """Field for the number of outputs of a prompt."""
    priority: str | None = "priority"
    """Field for the scheduling priority. None: the engine's priority scale differs from the trace's."""
    prompt_logprobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields that request prompt log probabilities, also in streams. Empty: not supported in streams."""
    lora: LoraFields = adapter_as_model
    lora_needs_map: bool = False
    """True: the adapter's name is not sufficient to select it."""
    chat_lengths: tuple[str, ...] = ("max_tokens",)
    chat_constant: Mapping[str, Any] = field(default_factory=dict)
    chat_stream_without: frozenset[str] = frozenset()
    """Fields of ``chat_constant`` that a streamed chat must omit."""
    responses_headroom: int = 0
    """Tokens by which the output of ``/v1/responses`` is shorter than ``max_output_tokens``."""
    exact_lengths: bool = True
    """True: the number of output tokens can be set exactly."""
    returns_ids: bool = True
    """True: the response to a token-id prompt has the output token ids."""

    def completion_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        """Return all fields except the prompt for ``tokens`` output tokens, exact if the engine supports it."""
        usage = USAGE if stream and self.asks_usage else {}
        return {"model": model, **dict.fromkeys(self.lengths, tokens), **self.constant, "stream": stream, **usage}

    def chat_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        without = self.chat_stream_without if stream else frozenset()
        constant = {name: value for name, value in self.chat_constant.items() if name not in without}
        usage = USAGE if stream else {}
        return {"model": model, **dict.fromkeys(self.chat_lengths, tokens), **constant, "stream": stream, **usage}

    def shape_fields(self, *, n: int | None, priority: int | None, prompt_logprobs: bool = False) -> dict[str, Any]:
        """Return the fields for the choices, priority and prompt log probabilities of a captured request."""
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
    """Return the value of a JSON text; None: invalid JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def reported_count(value: object) -> int | None:
    """Return a positive number that an engine reports, such as its block size; None: invalid."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 < value < MAX_REPORTED else None


def reported_text(value: object) -> str | None:
    """Return a short printable text that an engine reports; None: invalid."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS and value.isprintable() else None


# Any other server of OpenAI's API: documented fields only, none of which sets an exact number of output tokens.
OPENAI = Dialect(
    "openai",
    constant=GREEDY,
    priority=None,
    injectable=frozenset({"usage"}),
    chat_constant=GREEDY,
    exact_lengths=False,
    returns_ids=False,
)
