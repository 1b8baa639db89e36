"""SGLang.

Sources, as of 2026: ``CompletionRequest`` in ``python/sglang/srt/entrypoints/openai/protocol.py`` (vLLM's names; a
model is ``base:adapter``); ``/flush_cache`` and ``/server_info`` in ``entrypoints/http_server.py``. Streamed chats with
``return_token_ids`` are refused. Cached tokens are reported with ``--enable-cache-report``.
"""

from typing import Any

from engines.dialect import BOTH_LENGTHS, WITH_IDS, Control, Dialect, post_reset


def adapter_behind_model(model: str, adapter: str) -> dict[str, Any]:
    """Return SGLang's ``base:adapter``."""
    return {"model": f"{model}:{adapter}"}


def reset_cache(control: Control) -> None:
    """Flush the radix cache; SGLang returns 400 while anything is in flight."""
    post_reset(control, "/flush_cache", "an SGLang with nothing in flight")


SGLANG = Dialect(
    "sglang",
    owner="sglang",
    metric_prefix="sglang:",
    pages={"/server_info": "internal_states", "/get_server_info": "internal_states"},
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
        "prefix_queries": ("sglang:prompt_tokens",),
        "prefix_hits": ("sglang:cached_tokens",),
    },
    reset_cache=reset_cache,
    injectable=frozenset({"usage", "token-ids"}),
    lengths=BOTH_LENGTHS,
    constant=WITH_IDS,
    lora=adapter_behind_model,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=WITH_IDS,
    chat_stream_without=frozenset({"return_token_ids"}),
)
