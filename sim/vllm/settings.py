"""Scheduler settings of an engine: from trace headers, from flags, or assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import parse_groups
from tracefile.commandline.configfile import flag_of
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta

_ASSUMED = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}


@dataclass(frozen=True, slots=True)
class Settings:
    """Scheduler settings of an engine, and their origin."""

    config: EngineConfig
    assumed: dict[str, Any]
    """Default values of settings that are neither recorded nor set by a flag."""
    scheduling_recorded: bool
    """True: a trace or a flag sets ``async_scheduling``."""


def resolve_settings(metas: Mapping[str, Meta], overrides: Mapping[str, Any]) -> Settings:
    """Return the scheduler settings of the engine of the traces ``metas`` (by path). Raises InputError if headers
    disagree, or if a required setting is missing."""
    recorded: dict[str, Any] = {}
    source: dict[str, str] = {}
    for path, meta in metas.items():
        if not overrides.get("kv_groups"):
            refuse_other_attention(meta, path)
        reported = {} if meta.engine is None else msgspec.structs.asdict(meta.engine)
        for name in EngineConfig.__dataclass_fields__:
            value = reported.get(name)
            if value is None or overrides.get(name) is not None:
                continue
            if recorded.setdefault(name, value) != value:
                raise InputError(
                    f"{path}: meta.engine.{name}: {value}, but {recorded[name]} in {source[name]}; expected traces of "
                    f"one engine, or {flag_of(name)}"
                )
            source.setdefault(name, path)
    settings = {**recorded, **{k: v for k, v in overrides.items() if v is not None}}
    if settings.get("kv_groups"):
        settings["block_size"] = parse_groups(settings["kv_groups"]).match_unit
    settings.setdefault("block_size", _trace_block_size(metas))
    for name in ("block_size", "num_gpu_blocks"):
        if settings.get(name) is None:
            raise InputError(f"{next(iter(metas))}: meta.engine.{name}: not recorded; expected {flag_of(name)}")
    assumed = {name: value for name, value in _ASSUMED.items() if name not in settings}
    scheduling_recorded = "async_scheduling" in settings
    settings.setdefault("async_scheduling", False)
    return Settings(EngineConfig(**{**assumed, **settings}), assumed, scheduling_recorded)


def other_attention(meta: Meta) -> str | None:
    """Return the header field that reports a sliding window or several KV cache groups; None: no such field."""
    reported = {} if meta.engine is None else meta.engine.extra
    if reported.get("sliding_window"):
        return f"sliding_window: {reported['sliding_window']}"
    groups = reported.get("kv_cache_groups")
    return f"kv_cache_groups: {groups}" if isinstance(groups, int) and groups > 1 else None


def refuse_other_attention(meta: Meta, path: object, flag: str = "--kv-groups") -> None:
    """Raise InputError if the header reports other KV cache groups than full attention; ``flag`` sets the groups."""
    if (attention := other_attention(meta)) is not None:
        raise InputError(f"{path}: meta.engine.{attention}; expected {flag}, or an engine of full attention")


def _trace_block_size(metas: Mapping[str, Meta]) -> int | None:
    sizes = {meta.block_size for meta in metas.values()}
    return max((size for size in sizes if size is not None), default=None)


def model_name(metas: Sequence[Meta]) -> str | None:
    """Return the served model's name, unless the traces disagree."""
    names = {meta.model for meta in metas if meta.model is not None}
    return names.pop() if len(names) == 1 else None
