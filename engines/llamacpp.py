"""llama.cpp.

Sources, as of 2026: ``tools/server/README.md`` and ``server-task.cpp``. Its OpenAI endpoints return no token ids, but
``/completion`` does (``return_tokens``). ``lora`` is a list of adapter numbers. ``POST /slots/N?action=erase``
erases the KV cache of a slot. ``/tokenize`` takes a text; ``/apply-template`` renders a chat.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engines.dialect import IGNORE_EOS, Control, Dialect, decoded, post_reset, reported_count, reported_text
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine

SLOTS_PATH = "/slots"
COMPLETION_PATH = "/completion"


def adapter_number(model: str, adapter: str) -> dict[str, Any]:
    """Return fields that select the adapter by its number in ``GET /lora-adapters``; raises InputError."""
    if not adapter.isdecimal():
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=NUMBER for llama.cpp, as in its /lora-adapters")
    return {"model": model, "lora": [{"id": int(adapter), "scale": 1.0}]}


def read_settings(props: Mapping[str, Any]) -> Engine:
    """Return the engine settings in ``/props``; block size 1, since llama.cpp caches single tokens."""
    return Engine(
        name="llamacpp",
        version=reported_text(props.get("build_info")),
        block_size=1,
        max_num_seqs=reported_count(props.get("total_slots")),
    )


def slot_numbers(control: Control) -> Iterator[object]:
    """Return the ids of the slots; raises InputError if the engine does not list them."""
    slots = decoded(control.text(SLOTS_PATH))
    if not isinstance(slots, list) or not slots:
        raise InputError(f"--reset-cache: GET {SLOTS_PATH} lists no slots; expected a llama.cpp started with --slots")
    return (slot.get("id") if isinstance(slot, dict) else None for slot in slots)


def reset_cache(control: Control) -> None:
    """Erase the KV cache of every slot."""
    for number in slot_numbers(control):
        post_reset(
            control,
            f"{SLOTS_PATH}/{number}?action=erase",
            "a llama.cpp without requests in flight",
            unsupported="a llama.cpp started with --slot-save-path DIR, which allows it (and --cache-ram 0)",
        )


def displace(control: Control) -> None:
    """Send a one-token prompt to every slot: the slot's previous prompt moves to the host cache (``--cache-ram``)."""
    for number in slot_numbers(control):
        body = {"prompt": [1], "n_predict": 1, "id_slot": number, "cache_prompt": True}
        post_reset(control, COMPLETION_PATH, "a llama.cpp that completes prompts", body=msgspec.json.encode(body))


def has_reset(control: Control) -> bool | None:
    """Return whether slots can be erased, by an unknown action: 501 without ``--slot-save-path``, else 400."""
    return {501: False, 400: True}.get(control.post(f"{SLOTS_PATH}/0?action=none").status)


def reports_cached(control: Control) -> bool:
    """Return True: every response has cached tokens."""
    return True


LLAMA_CPP = Dialect(
    "llamacpp",
    owner="llamacpp",
    metric_prefix="llamacpp:",
    pages={"/props": "build_info"},
    read_settings=read_settings,
    gauges={
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_usage": ("llamacpp:kv_cache_usage_ratio",),
        # Computed tokens + cached tokens.
        "prefix_queries": ("llamacpp:prompt_tokens + llamacpp:prompt_tokens_cached",),
        "prefix_hits": ("llamacpp:prompt_tokens_cached",),
    },
    reset_cache=reset_cache,
    has_reset=has_reset,
    reset_setting="--slot-save-path DIR",
    reports_cached=reports_cached,
    displace=displace,
    reset_hint=" (llama.cpp also caches prompts in host memory: start it with --cache-ram 0)",
    tokenizes_content=True,
    path=COMPLETION_PATH,
    lengths=("n_predict",),
    constant={**IGNORE_EOS, "return_tokens": True, "cache_prompt": True},
    asks_usage=False,
    choices="n_cmpl",
    priority=None,
    lora=adapter_number,
    lora_needs_map=True,
    chat_constant=IGNORE_EOS,
)
