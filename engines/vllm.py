"""vLLM.

Sources, as of 2026: ``CompletionRequest`` in ``vllm/entrypoints/openai/completion/protocol.py`` (ignore_eos,
min_tokens, priority, return_token_ids; a LoRA adapter is a model's name); ``POST /reset_prefix_cache`` in
``entrypoints/serve/dev/cache``, which returns ``{"success": …}``.
"""

from engines.dialect import BOTH_LENGTHS, WITH_IDS, Control, Dialect, decoded, post_reset
from tracefile.records.errors import InputError

RESET_PATH = "/reset_prefix_cache"
EMBEDDED = "kvtape"
"""``owned_by`` of ``sim serve``, which has vLLM's dialect."""
EMBEDDED_NAME = "kvtape sim"
"""Engine name of ``sim serve`` in ``/version``."""


def reset_cache(control: Control) -> None:
    """Reset the prefix cache; raises InputError while requests still hold blocks (``success: false``)."""
    body = post_reset(control, RESET_PATH, "an engine that has it (vLLM: VLLM_SERVER_DEV_MODE=1)")
    if decoded(body) == {"success": False}:
        raise InputError(f"--reset-cache: POST {RESET_PATH} failed; expected an engine without requests in flight")


def has_reset(control: Control) -> bool | None:
    """Return whether the prefix cache reset exists, by the status of a GET: 405 if so, else 404."""
    return {405: True, 404: False}.get(control.status(RESET_PATH) or 0)


def reports_cached(control: Control) -> bool | None:
    """Return True for ``sim serve``, which reports cached tokens; None for vLLM, which does not report its flag."""
    listed = control.text("/v1/models").replace(" ", "")
    return True if f'"owned_by":"{EMBEDDED}"' in listed else None


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
    has_reset=has_reset,
    reset_setting="VLLM_SERVER_DEV_MODE=1",
    reports_cached=reports_cached,
    cached_setting="--enable-prompt-tokens-details",
    injectable=frozenset({"usage", "token-ids"}),
    lengths=BOTH_LENGTHS,
    constant=WITH_IDS,
    prompt_logprobs={"prompt_logprobs": 0},
    chat_lengths=BOTH_LENGTHS,
    chat_constant=WITH_IDS,
)
