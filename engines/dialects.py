"""What each engine takes and gives: how it is told an answer's exact length, and how it says which tokens it made.

Every field here is one that the engine's own source reads; an engine that refuses unknown fields is sent none of
another's. The sources, each as of 2026:

- vLLM: ``CompletionRequest`` in ``vllm/entrypoints/openai/completion/protocol.py`` (ignore_eos, min_tokens, priority,
  return_token_ids; a LoRA adapter is a model's name), ``POST /reset_prefix_cache`` in ``entrypoints/serve/dev/cache``,
  which answers ``{"success": …}``; ``X-Session-ID`` in ``entrypoints/generate/base/serving.py``.
- SGLang: ``CompletionRequest`` in ``python/sglang/srt/entrypoints/openai/protocol.py`` (the same names; a model is
  ``base:adapter``), ``/flush_cache`` in ``entrypoints/http_server.py``, which answers 400 while requests run. Streamed
  chats with ``return_token_ids`` are refused. Cached tokens are reported with ``--enable-cache-report``.
- llama.cpp: ``tools/server/README.md`` and ``server-task.cpp``. Its OpenAI endpoints give no token ids, its own
  ``/completion`` does (``return_tokens``); ``lora`` is a list of adapters' numbers; ``POST /slots/N?action=erase``.
- TensorRT-LLM: ``CompletionRequest`` in ``tensorrt_llm/serve/openai_protocol.py``, where every model forbids unknown
  fields; ``postprocess_handlers.py`` gives ``token_ids`` in place of text where ``detokenize`` is false. Priorities are
  0 to 1, the highest first, so no other engine's numbers are sent. Its released servers reset no cache.
- OpenAI: only what its reference documents; nothing there makes an answer longer than the model likes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tracefile import InputError

DialectName = Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm", "openai"]

COMPLETIONS_PATH = "/v1/completions"
LLAMA_CPP_PATH = "/completion"

USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}

LoraFields = Callable[[str, str], dict[str, Any]]
"""The fields that name a model with an adapter, for the model's name and the adapter's."""


def adapter_as_model(model: str, adapter: str) -> dict[str, Any]:
    """vLLM serves each adapter as a model of its own name."""
    return {"model": adapter}


def adapter_behind_model(model: str, adapter: str) -> dict[str, Any]:
    """SGLang's ``base:adapter``."""
    return {"model": f"{model}:{adapter}"}


def adapter_number(model: str, adapter: str) -> dict[str, Any]:
    """llama.cpp's list of adapters by number, as ``GET /lora-adapters`` counts them; raises InputError."""
    if not adapter.isdecimal():
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=NUMBER for llama.cpp, as in its /lora-adapters")
    return {"model": model, "lora": [{"id": int(adapter), "scale": 1.0}]}


def adapter_with_path(model: str, adapter: str) -> dict[str, Any]:
    """TensorRT-LLM's ``lora_request``, from ``NAME:NUMBER:PATH``; raises InputError."""
    name, _, rest = adapter.partition(":")
    number, _, path = rest.partition(":")
    if not name or not number.isdecimal() or not path:
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=ADAPTER:NUMBER:PATH for TensorRT-LLM")
    return {"model": model, "lora_request": {"lora_name": name, "lora_int_id": int(number), "lora_path": path}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's way with token-id prompts, and with chats where that differs."""

    name: DialectName
    path: str = COMPLETIONS_PATH
    """Where prompts of token ids go."""
    lengths: tuple[str, ...] = ("max_tokens",)
    """Fields that hold how many tokens to generate, of each choice."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """What every such request says besides."""
    asks_usage: bool = True
    """Whether a stream tells its usage only where it is asked to."""
    choices: str = "n"
    """The field for several answers to one prompt."""
    priority: str | None = "priority"
    """Null: the trace's priorities mean nothing to it."""
    lora: LoraFields = adapter_as_model
    lora_needs_map: bool = False
    """Whether an adapter's name alone does not select it."""
    chat_lengths: tuple[str, ...] = ("max_tokens",)
    chat_constant: Mapping[str, Any] = field(default_factory=dict)
    chat_stream_without: frozenset[str] = frozenset()
    """Of those, what a streamed chat must not say."""
    exact_lengths: bool = True
    """Whether an answer can be made as long as wanted."""
    returns_ids: bool = True
    """Whether the ids of an answer to a token-id prompt come back."""

    def completion_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        """All fields but the prompt of a request that generates exactly so many tokens, as far as that can be."""
        usage = USAGE if stream and self.asks_usage else {}
        return {"model": model, **dict.fromkeys(self.lengths, tokens), **self.constant, "stream": stream, **usage}

    def chat_fields(self, model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
        """The same for ``/v1/chat/completions``, all but the messages."""
        without = self.chat_stream_without if stream else frozenset()
        constant = {name: value for name, value in self.chat_constant.items() if name not in without}
        usage = USAGE if stream else {}
        return {"model": model, **dict.fromkeys(self.chat_lengths, tokens), **constant, "stream": stream, **usage}

    def shape_fields(self, *, n: int | None, priority: int | None) -> dict[str, Any]:
        """What else of a captured request's shape this engine is told."""
        shape: dict[str, Any] = {}
        if n is not None:
            shape[self.choices] = n
        if priority is not None and self.priority is not None:
            shape[self.priority] = priority
        return shape


GREEDY: Mapping[str, Any] = {"temperature": 0}
"""Two runs of one workload get the same answers as far as the engine can give them."""
PAST_ITS_END: Mapping[str, Any] = {"ignore_eos": True, **GREEDY}
WITH_IDS: Mapping[str, Any] = {**PAST_ITS_END, "return_token_ids": True}
BOTH_LENGTHS = ("max_tokens", "min_tokens")

VLLM = Dialect("vllm", lengths=BOTH_LENGTHS, constant=WITH_IDS, chat_lengths=BOTH_LENGTHS, chat_constant=WITH_IDS)
SGLANG = Dialect(
    "sglang",
    lengths=BOTH_LENGTHS,
    constant=WITH_IDS,
    lora=adapter_behind_model,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=WITH_IDS,
    chat_stream_without=frozenset({"return_token_ids"}),
)
LLAMA_CPP = Dialect(
    "llama.cpp",
    path=LLAMA_CPP_PATH,
    lengths=("n_predict",),
    constant={**PAST_ITS_END, "return_tokens": True, "cache_prompt": True},
    asks_usage=False,
    choices="n_cmpl",
    priority=None,
    lora=adapter_number,
    lora_needs_map=True,
    chat_constant=PAST_ITS_END,
)
TENSORRT_LLM = Dialect(
    "tensorrt-llm",
    lengths=BOTH_LENGTHS,
    constant={**PAST_ITS_END, "detokenize": False},
    priority=None,
    lora=adapter_with_path,
    lora_needs_map=True,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=PAST_ITS_END,
)
OPENAI = Dialect("openai", constant=GREEDY, priority=None, chat_constant=GREEDY, exact_lengths=False, returns_ids=False)

DIALECTS: Mapping[DialectName, Dialect] = {
    dialect.name: dialect for dialect in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, OPENAI)
}
AUTO = "auto"
CHOICES = (AUTO, *get_args(DialectName))
"""What ``--dialect`` takes."""
