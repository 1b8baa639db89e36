"""llama.cpp.

Sources, as of 2026: ``tools/server/README.md`` and ``server-task.cpp``. Its OpenAI endpoints return no token ids, but
``/completion`` does (``return_tokens``). ``lora`` is a list of adapters' numbers. ``POST /slots/N?action=erase``
empties a slot. ``/tokenize`` takes a text; ``/apply-template`` renders a chat.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engines.dialect import PAST_ITS_END, Control, Dialect, decoded, post_reset, told_count, told_text
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine

SLOTS_PATH = "/slots"
OWN_PATH = "/completion"


def adapter_number(model: str, adapter: str) -> dict[str, Any]:
    """Return the adapter by number, as ``GET /lora-adapters`` counts them; raises InputError."""
    if not adapter.isdecimal():
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=NUMBER for llama.cpp, as in its /lora-adapters")
    return {"model": model, "lora": [{"id": int(adapter), "scale": 1.0}]}


def read_settings(props: Mapping[str, Any]) -> Engine:
    """Return the engine that ``/props`` tells of; its cache holds single tokens."""
    return Engine(
        name="llamacpp",
        version=told_text(props.get("build_info")),
        block_size=1,
        max_num_seqs=told_count(props.get("total_slots")),
    )


def slot_numbers(control: Control) -> Iterator[object]:
    """Ids of the slots; raises InputError if the engine does not list them."""
    slots = decoded(control.text(SLOTS_PATH))
    if not isinstance(slots, list) or not slots:
        raise InputError(f"--reset-cache: GET {SLOTS_PATH} lists none; expected a llama.cpp started with --slots")
    return (slot.get("id") if isinstance(slot, dict) else None for slot in slots)


def reset_cache(control: Control) -> None:
    """Erase the prompt of every slot."""
    for number in slot_numbers(control):
        post_reset(
            control,
            f"{SLOTS_PATH}/{number}?action=erase",
            "a llama.cpp with nothing in flight",
            unsupported="a llama.cpp started with --slot-save-path DIR, which allows it (and --cache-ram 0)",
        )


def displace(control: Control) -> None:
    """Send a prompt of one token to every slot: the prompt before it moves to the cache in memory, if there is one."""
    for number in slot_numbers(control):
        body = {"prompt": [1], "n_predict": 1, "id_slot": number, "cache_prompt": True}
        post_reset(control, OWN_PATH, "a llama.cpp that completes prompts", body=msgspec.json.encode(body))


def has_reset(control: Control) -> bool | None:
    """Tell by an action that no server knows: 501 without ``--slot-save-path``, else 400."""
    return {501: False, 400: True}.get(control.post(f"{SLOTS_PATH}/0?action=none").status)


def reports_cached(control: Control) -> bool:
    """Return True: every response has them."""
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
        # Tokens that were computed, and tokens that were not.
        "prefix_queries": ("llamacpp:prompt_tokens + llamacpp:prompt_tokens_cached",),
        "prefix_hits": ("llamacpp:prompt_tokens_cached",),
    },
    reset_cache=reset_cache,
    has_reset=has_reset,
    reset_setting="--slot-save-path DIR",
    reports_cached=reports_cached,
    displace=displace,
    reset_hint=" (it keeps prompts in memory besides its slots: start it with --cache-ram 0)",
    tokenizes_content=True,
    path=OWN_PATH,
    lengths=("n_predict",),
    constant={**PAST_ITS_END, "return_tokens": True, "cache_prompt": True},
    asks_usage=False,
    choices="n_cmpl",
    priority=None,
    lora=adapter_number,
    lora_needs_map=True,
    chat_constant=PAST_ITS_END,
)
