"""Emptying the engine's prefix cache before a run, and making sure that it is empty."""

import secrets
from typing import Any

import msgspec

from loadgen.bodies import completions_body
from loadgen.draws import Vocabulary, text_key, tokens_of
from loadgen.engine import ControlClient
from tracefile import InputError

RESET_PATH = "/reset_prefix_cache"
DEFAULT_PROBE_BLOCK = 256
"""More than any engine's block, where it does not say its own."""


def reset_prefix_cache(
    control: ControlClient, model: str, vocabulary: Vocabulary, block_size: int | None
) -> str | None:
    """Reset, and check that what had been cached is gone; returns a note if that could not be checked.

    The check is a prompt of two blocks sent before and after the reset: the second time nothing of it may be cached.
    A last reset takes the check itself out of the cache. Raises InputError if the engine has no reset or it does
    not work.
    """
    probe_tokens = 2 * (block_size or DEFAULT_PROBE_BLOCK) + 1
    # A word of its own: what an earlier check left behind must not look like this one's.
    body = completions_body(model, tokens_of(text_key(secrets.token_hex(8)), probe_tokens, vocabulary), 1, stream=False)
    _probe(control, body)
    _reset(control)
    cached_tokens = _probe(control, body)
    _reset(control)
    if cached_tokens is None:
        return "--reset-cache: done, but the engine reports no cached tokens, so whether it worked is not known"
    if cached_tokens > 0:
        raise InputError(f"--reset-cache: {cached_tokens} tokens still cached after POST {RESET_PATH}; expected none")
    return None


def _reset(control: ControlClient) -> None:
    response = control.post(RESET_PATH)
    if not response.is_success:
        raise InputError(
            f"--reset-cache: POST {RESET_PATH} gave HTTP {response.status_code}; expected an engine that has it "
            "(vLLM: VLLM_SERVER_DEV_MODE=1)"
        )


def _probe(control: ControlClient, body: bytes) -> int | None:
    """Cached tokens of one small request; null: not reported."""
    response = control.post("/v1/completions", body)
    if not response.is_success:
        raise InputError(f"--reset-cache: the check's own request gave HTTP {response.status_code}; expected 200")
    try:
        usage: dict[str, Any] = msgspec.json.decode(response.content)["usage"]
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return None
    return cached_tokens if isinstance(cached_tokens, int) else None
