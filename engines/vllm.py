"""vLLM.

Sources, as of 2026: ``CompletionRequest`` in ``vllm/entrypoints/openai/completion/protocol.py`` (ignore_eos,
min_tokens, priority, return_token_ids; a LoRA adapter is a model's name); ``POST /reset_prefix_cache`` in
``entrypoints/serve/dev/cache``, which returns ``{"success": …}``.
"""

from engines.dialect import BOTH_LENGTHS, WITH_IDS, Control, Dialect, decoded, post_reset
from tracefile.records.errors import InputError

RESET_PATH = "/reset_prefix_cache"


def reset_cache(control: Control) -> None:
    """Reset the prefix cache; raises InputError while blocks are still held, as the body then says."""
    body = post_reset(control, RESET_PATH, "an engine that has it (vLLM: VLLM_SERVER_DEV_MODE=1)")
    if decoded(body) == {"success": False}:
        raise InputError(f"--reset-cache: POST {RESET_PATH} did not succeed; expected an engine with nothing in flight")


VLLM = Dialect(
    "vllm",
    owner="vllm",
    metric_prefix="vllm:",
    gauges={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "preemptions": ("vllm:num_preemptions",),
    },
    reset_cache=reset_cache,
    injectable=frozenset({"usage", "token-ids"}),
    lengths=BOTH_LENGTHS,
    constant=WITH_IDS,
    chat_lengths=BOTH_LENGTHS,
    chat_constant=WITH_IDS,
)
