"""What makes two runs the same experiment: if it differs, so may their times, and the difference is an effect."""

from typing import Any, Final

from tracefile.records.schema import Meta

_SETTINGS: Final = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "scheduling_policy",
    "free_rule",
)
"""Engine settings that two runs under the same conditions agree in, as far as both tell them."""
_SAME_CACHE: Final = 0.01
"""An engine that sizes its own cache finds a few blocks more or fewer at every start: that is no other cache."""


def same_conditions(truth: Meta, other: Meta) -> bool:
    """Whether the two ran the same prompts, at the same pace, on an engine with the same cache and scheduler.

    A setting that a side does not tell is taken to agree: a tap cannot learn them all.
    """
    if (_workload(truth), _caches(truth)) != (_workload(other), _caches(other)):
        return False
    blocks, others = _setting(truth, "num_gpu_blocks"), _setting(other, "num_gpu_blocks")
    if blocks is not None and others is not None and abs(others - blocks) > _SAME_CACHE * blocks:
        return False
    pairs = [(_setting(truth, name), _setting(other, name)) for name in _SETTINGS]
    return all(t == o for t, o in pairs if t is not None and o is not None)


def _workload(meta: Meta) -> tuple[bool, float]:
    workload = meta.workload
    return bool(workload and workload.cold_prompts), (workload.speedup if workload else None) or 1.0


def _caches(meta: Meta) -> bool:
    return meta.engine is None or meta.engine.enable_prefix_caching is not False


def _setting(meta: Meta, name: str) -> Any:
    """As the header's engine has it, or among what a forecast says of itself; None: not told."""
    told = getattr(meta.engine, name, None)
    if told is None and meta.engine is not None:
        told = meta.engine.extra.get(name)
    settings = meta.extra.get("settings")
    return settings.get(name) if told is None and isinstance(settings, dict) else told
