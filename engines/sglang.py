"""SGLang.

Sources, as of 2026: ``CompletionRequest`` in ``python/sglang/srt/entrypoints/openai/protocol.py`` (vLLM's names; a
model is ``base:adapter``); ``/flush_cache`` and ``/server_info`` in ``entrypoints/http_server.py``. Streamed chats with
``return_token_ids`` are refused. Cached tokens are reported with ``--enable-cache-report``.
"""

from collections.abc import Mapping
from typing import Any

from engines.dialect import BOTH_LENGTHS, WITH_IDS, Control, Dialect, decoded, post_reset, told_count, told_text
from tracefile.records.schema import Engine


def adapter_behind_model(model: str, adapter: str) -> dict[str, Any]:
    """Return SGLang's ``base:adapter``."""
    return {"model": f"{model}:{adapter}"}


def read_settings(info: Mapping[str, Any]) -> Engine:
    """Return the engine that ``/server_info`` tells of. Other fields of that page may be secrets."""
    page, room = told_count(info.get("page_size")), told_count(info.get("max_total_num_tokens"))
    off = info.get("disable_radix_cache")
    kept = {"max_total_num_tokens": room, "chunked_prefill_size": told_count(info.get("chunked_prefill_size"))}
    return Engine(
        name="sglang",
        version=told_text(info.get("version")),
        block_size=page,
        max_num_seqs=told_count(info.get("max_running_requests")),
        enable_prefix_caching=None if not isinstance(off, bool) else not off,
        extra={name: value for name, value in kept.items() if value is not None},
    )


def reset_cache(control: Control) -> None:
    """Flush the radix cache; SGLang returns 400 while anything is in flight."""
    post_reset(control, "/flush_cache", "an SGLang with nothing in flight")


def has_reset(control: Control) -> bool:
    """Return True: every SGLang has its reset."""
    return True


def reports_cached(control: Control) -> bool | None:
    """Tell by the settings at ``/server_info``; null: they are not there."""
    settings = decoded(control.text("/server_info"))
    told = settings.get("enable_cache_report") if isinstance(settings, dict) else None
    return told if isinstance(told, bool) else None


SGLANG = Dialect(
    "sglang",
    owner="sglang",
    metric_prefix="sglang:",
    pages={"/server_info": "internal_states", "/get_server_info": "internal_states"},
    read_settings=read_settings,
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
        "prefix_queries": ("sglang:prompt_tokens",),
        "prefix_hits": ("sglang:cached_tokens",),
        "preemptions": ("sglang:num_retracted_requests",),
    },
    reset_cache=reset_cache,
    has_reset=has_reset,
    reports_cached=reports_cached,
    cached_setting="--enable-cache-report",
    injectable=frozenset({"usage"}),
    lengths=BOTH_LENGTHS,
    constant=WITH_IDS,
    lora=adapter_behind_model,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=WITH_IDS,
    responses_headroom=2,
    chat_stream_without=frozenset({"return_token_ids"}),
)
