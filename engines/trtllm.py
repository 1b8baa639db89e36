"""TensorRT-LLM.

Sources, as of 2026: ``CompletionRequest`` in ``tensorrt_llm/serve/openai_protocol.py``, where every model forbids
unknown fields; ``postprocess_handlers.py``, which returns ``token_ids`` instead of text where ``detokenize`` is false.
Priorities are 0 to 1, so no other engine's numbers are sent. Released servers have no cache reset.
"""

from typing import Any

from engines.dialect import BOTH_LENGTHS, IGNORE_EOS, Control, Dialect, post_reset
from engines.vllm import RESET_PATH, has_reset
from tracefile.records.errors import InputError


def adapter_with_path(model: str, adapter: str) -> dict[str, Any]:
    """Return ``lora_request`` from ``NAME:NUMBER:PATH``; raises InputError."""
    name, _, number_and_path = adapter.partition(":")
    number, _, path = number_and_path.partition(":")
    if not name or not number.isdecimal() or not path:
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=ADAPTER:NUMBER:PATH for TensorRT-LLM")
    return {"model": model, "lora_request": {"lora_name": name, "lora_int_id": int(number), "lora_path": path}}


def reset_cache(control: Control) -> None:
    """Reset the prefix cache by vLLM's path, if the server is built with it."""
    post_reset(control, RESET_PATH, "a TensorRT-LLM built with it: restart the server, or use --cold-prompts")


TENSORRT_LLM = Dialect(
    "trtllm",
    owner="tensorrt_llm",
    reset_cache=reset_cache,
    has_reset=has_reset,
    lengths=BOTH_LENGTHS,
    constant={**IGNORE_EOS, "detokenize": False},
    priority=None,
    lora=adapter_with_path,
    lora_needs_map=True,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=IGNORE_EOS,
)
