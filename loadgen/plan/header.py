"""Header of a load's trace: target, hashes, and the flags that made the load."""

from collections.abc import Mapping
from dataclasses import fields

import msgspec

from engines.facts import EngineFacts
from loadgen.core.request import SESSION_HEADER
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import ELSEWHERE, LoadJob
from tracefile import Meta, Workload

ALWAYS_TOLD = frozenset({"api", "rate", "duration_s", "number", "parallel", "prompt_tokens", "output_tokens", "turns"})
"""Flags that the trace's header has even where they were not given."""

OWN_FIELDS = frozenset({"pattern", "seed", "fields"})


def meta_of(job: LoadJob, facts: EngineFacts, more: Mapping[str, object] | None = None) -> Meta:
    """Return the header; ``more``: further fields of its workload."""
    config = job.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    return Meta(
        source="client",
        model=job.model,
        tokenizer=job.target.tokenizer or ("ids" if config.api == "completions" else None),
        block_size=job.block_size,
        hash=msgspec.structs.replace(job.hasher().info, branches=job.branches or None),
        engine=msgspec.structs.replace(facts.engine, gpus=config.run.gpus),
        workload=Workload(pattern=config.arrivals, seed=config.seed, extra=_shape(config) | dict(more or {})),
        extra=counters,
    )


def _shape(config: LoadConfig) -> dict[str, object]:
    """Flags that made the load, for readers of the trace; flags left at their defaults are omitted."""
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in ELSEWHERE}
    defaults = {each.name: each.default for each in fields(config)}
    elsewhere: dict[str, object] = {} if config.at_end == "finish" else {"at_end": config.at_end}
    elsewhere |= {} if config.token_seed is None else {"token_seed": config.token_seed}
    if config.session_headers != (SESSION_HEADER,):
        elsewhere["session_headers"] = ", ".join(config.session_headers)
    told = {name: value for name, value in given.items() if name in ALWAYS_TOLD or value != defaults[name]}
    return (
        {
            name: value if isinstance(value, float | int | None) else str(value)
            for name, value in told.items()
            if name not in OWN_FIELDS
        }
        | config.fields.described()
        | elsewhere
    )
