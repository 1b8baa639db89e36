"""SGLang.

Sources, as of 2026: ``CompletionRequest`` in ``python/sglang/srt/entrypoints/openai/protocol.py`` (vLLM's names; a
model is ``base:adapter``); ``/flush_cache`` and ``/server_info`` in ``entrypoints/http_server.py``. Streamed chats with
``return_token_ids`` are refused. Cached tokens are reported with ``--enable-cache-report``.
"""

from collections.abc import Mapping
from typing import Any

from engines.dialect import BOTH_LENGTHS, WITH_IDS, Control, Dialect, decoded, post_reset, reported_count, reported_text
from tracefile.records.schema import Engine


def adapter_behind_model(model: str, adapter: str) -> dict[str, Any]:
    """Return the model name ``base:adapter``."""
    return {"model": f"{model}:{adapter}"}


def read_settings(info: Mapping[str, Any]) -> Engine:
    """Return page size, KV cache size and prefill settings in ``/server_info``, which also has secrets."""
    off = info.get("disable_radix_cache")
    extra = {name: reported_count(info.get(name)) for name in ("max_total_num_tokens", "chunked_prefill_size")}
    return Engine(
        name="sglang",
        version=reported_text(info.get("version")),
        block_size=reported_count(info.get("page_size")),
        max_num_seqs=reported_count(info.get("max_running_requests")),
        enable_prefix_caching=None if not isinstance(off, bool) else not off,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def reset_cache(control: Control) -> None:
    """Flush the radix (prefix) cache; SGLang returns 400 while requests are in flight."""
    post_reset(control, "/flush_cache", "an SGLang without requests in flight")


def has_reset(control: Control) -> bool:
    """Return True: every SGLang can flush its prefix cache."""
    return True


def reports_cached(control: Control) -> bool | None:
    """Return whether cached tokens are reported, by ``/server_info``; None: no such page."""
    settings = decoded(control.text("/server_info"))
    reports = settings.get("enable_cache_report") if isinstance(settings, dict) else None
    return reports if isinstance(reports, bool) else None


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
