"""llama.cpp.

Sources, as of 2026: ``tools/server/README.md`` and ``server-task.cpp``. Its OpenAI endpoints return no token ids, but
``/completion`` does (``return_tokens``). ``lora`` is a list of adapters' numbers. ``POST /slots/N?action=erase``
empties a slot. ``/tokenize`` takes a text; ``/apply-template`` renders a chat.
"""

from typing import Any

from engines.dialect import PAST_ITS_END, Control, Dialect, decoded, post_reset
from tracefile.records.errors import InputError

SLOTS_PATH = "/slots"


def adapter_number(model: str, adapter: str) -> dict[str, Any]:
    """Return the adapter by number, as ``GET /lora-adapters`` counts them; raises InputError."""
    if not adapter.isdecimal():
        raise InputError(f"--lora-map: {adapter!r}; expected NAME=NUMBER for llama.cpp, as in its /lora-adapters")
    return {"model": model, "lora": [{"id": int(adapter), "scale": 1.0}]}


def reset_cache(control: Control) -> None:
    """Erase the prompt of every slot."""
    slots = decoded(control.text(SLOTS_PATH))
    if not isinstance(slots, list) or not slots:
        raise InputError(f"--reset-cache: GET {SLOTS_PATH} lists none; expected a llama.cpp started with --slots")
    for slot in slots:
        number = slot.get("id") if isinstance(slot, dict) else None
        post_reset(control, f"{SLOTS_PATH}/{number}?action=erase", "a llama.cpp with nothing in flight")


LLAMA_CPP = Dialect(
    "llamacpp",
    owner="llamacpp",
    metric_prefix="llamacpp:",
    pages={"/props": "build_info"},
    gauges={
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_usage": ("llamacpp:kv_cache_usage_ratio",),
    },
    reset_cache=reset_cache,
    reset_hint=" (it keeps prompts in memory besides its slots: start it with --cache-ram 0)",
    injectable=frozenset({"usage"}),
    tokenizes_content=True,
    path="/completion",
    lengths=("n_predict",),
    constant={**PAST_ITS_END, "return_tokens": True, "cache_prompt": True},
    asks_usage=False,
    choices="n_cmpl",
    priority=None,
    lora=adapter_number,
    lora_needs_map=True,
    chat_constant=PAST_ITS_END,
)
