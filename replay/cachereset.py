"""Emptying the engine's prefix cache before a run, each engine in its own way, and making sure that it is empty."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engines.control import ControlClient
from engines.dialects import Dialect, DialectName
from loadgen.core.bodies import completions_body
from loadgen.core.draws import Vocabulary, text_key, tokens_of
from tracefile import InputError
from wire.answer import parse_answer

VLLM_PATH = "/reset_prefix_cache"
SGLANG_PATH = "/flush_cache"
SLOTS_PATH = "/slots"
DEFAULT_PROBE_BLOCK = 256
"""More than any engine's block, where it does not say its own."""


def reset_prefix_cache(
    control: ControlClient, dialect: Dialect, model: str, vocabulary: Vocabulary, block_size: int | None
) -> str | None:
    """Reset, and check that what had been cached is gone; returns a note if that could not be checked.

    The check is a prompt of two blocks sent before and after the reset: the second time nothing of it may be cached.
    A last reset takes the check itself out of the cache. Raises InputError if the engine has no reset or it does
    not work.
    """
    reset = RESETS.get(dialect.name)
    if reset is None:
        raise InputError(f"--reset-cache: not known how with --dialect {dialect.name}; expected {', '.join(RESETS)}")
    probe_tokens = 2 * (block_size or DEFAULT_PROBE_BLOCK) + 1
    # A word of its own: what an earlier check left behind must not look like this one's.
    token_ids = tokens_of(text_key(secrets.token_hex(8)), probe_tokens, vocabulary)
    body = completions_body(model, token_ids, 1, stream=False, dialect=dialect)
    _probe(control, dialect, body)
    reset(control)
    cached_tokens = _probe(control, dialect, body)
    reset(control)
    if cached_tokens is None:
        return "--reset-cache: done, but the engine reports no cached tokens, so whether it worked is not known"
    if cached_tokens > 0:
        raise InputError(
            f"--reset-cache: {cached_tokens} tokens still cached after {dialect.name}'s reset; expected none"
            + (HINTS.get(dialect.name) or "")
        )
    return None


def reset_vllm(control: ControlClient) -> None:
    """vLLM says in the body whether it worked: blocks that are still held keep it from it."""
    response = _post(control, VLLM_PATH, "an engine that has it (vLLM: VLLM_SERVER_DEV_MODE=1)")
    if _decoded(response) == {"success": False}:
        raise InputError(f"--reset-cache: POST {VLLM_PATH} did not succeed; expected an engine with nothing in flight")


def reset_sglang(control: ControlClient) -> None:
    """SGLang answers 400 while anything is in flight."""
    _post(control, SGLANG_PATH, "an SGLang with nothing in flight")


def reset_llama_cpp(control: ControlClient) -> None:
    """llama.cpp keeps a prompt for each slot; each is erased."""
    slots = _decoded(control.text(SLOTS_PATH).encode())
    if not isinstance(slots, list) or not slots:
        raise InputError(f"--reset-cache: GET {SLOTS_PATH} lists none; expected a llama.cpp started with --slots")
    for slot in slots:
        number = slot.get("id") if isinstance(slot, dict) else None
        _post(control, f"{SLOTS_PATH}/{number}?action=erase", "a llama.cpp with nothing in flight")


def reset_tensorrt_llm(control: ControlClient) -> None:
    """Only servers built with it have one; vLLM's name was taken for it."""
    _post(control, VLLM_PATH, "a TensorRT-LLM built with it: start the server anew, or use --cold-prompts")


RESETS: Mapping[DialectName, Callable[[ControlClient], None]] = {
    "vllm": reset_vllm,
    "sglang": reset_sglang,
    "llama.cpp": reset_llama_cpp,
    "tensorrt-llm": reset_tensorrt_llm,
}
HINTS: Mapping[DialectName, str] = {
    "llama.cpp": " (it keeps prompts in memory besides its slots: start it with --cache-ram 0)"
}


def _post(control: ControlClient, path: str, expected: str) -> bytes:
    response = control.post(path)
    if not response.is_success:
        raise InputError(f"--reset-cache: POST {path} gave HTTP {response.status_code}; expected {expected}")
    return response.content


def _decoded(body: bytes) -> Any:
    """A JSON text's value; null if it is none."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def _probe(control: ControlClient, dialect: Dialect, body: bytes) -> int | None:
    """Cached tokens of one small request; null: not reported."""
    response = control.post(dialect.path, body)
    if not response.is_success:
        raise InputError(f"--reset-cache: the check's own request gave HTTP {response.status_code}; expected 200")
    return parse_answer(dialect.path, [(0, response.content)], stream=False).cached_tokens
