"""KV cache of an engine with several KV groups, built from its settings."""

from sim.vllm.blocks import NONE, BlockPool
from sim.vllm.config import EngineConfig
from sim.vllm.groups import ChunkGroup, Form, Group, HitRules, WindowGroup
from sim.vllm.hybridcache import ChunkLimits, HybridCache
from sim.vllm.kvcache import UNLIMITED
from sim.vllm.kvgroups import KvGroup, KvLayout
from sim.vllm.states import StateGroup
from tracefile.records.schema import MOST_TOKENS


def make_hybrid_cache(config: EngineConfig) -> HybridCache:
    """Return an empty KV cache over all KV groups of an engine."""
    layout = config.layout
    assert layout is not None
    caching = config.enable_prefix_caching
    pool = BlockPool(config.num_gpu_blocks)
    rules = HitRules(
        layout.match_unit,
        layout.alignment,
        layout.block_size,
        NONE if layout.retain is None else layout.retain,
        drops=bool(layout.dropping),
        partial_hits=layout.partial_hits,
        is_alone=len(layout.groups) == 1,
    )
    groups = [_group(config, spec, pool, rules, index in layout.dropping) for index, spec in enumerate(layout.groups)]
    states = [spec for spec in layout.groups if spec.keeps_state]
    limits = ChunkLimits(
        states[0].block_size if states and caching else 0,
        config.max_num_batched_tokens,
        stores_inside=all(spec.kind == "mamba2" for spec in states),
    )
    return HybridCache(
        pool,
        rules,
        groups,
        _forms(layout, groups),
        limits,
        max_model_len=config.max_model_len or MOST_TOKENS,
        caching=caching,
    )


def _forms(layout: KvLayout, groups: list[Group]) -> list[Form]:
    """Return sets of equal KV groups, which share a prefix lookup; full attention first."""
    forms = []
    for spec in sorted(dict.fromkeys(layout.groups), key=lambda spec: not spec.sees_all):
        equal_groups = [group for group, other in zip(groups, layout.groups, strict=True) if other == spec]
        margin = layout.match_unit if layout.partial_hits and spec.sees_all else equal_groups[0].size
        forms.append(Form(equal_groups, 0 if spec.keeps_state else margin))
    return forms


def _group(config: EngineConfig, spec: KvGroup, pool: BlockPool, rules: HitRules, drops_last: bool) -> Group:
    longest, size = config.max_model_len or MOST_TOKENS, spec.block_size
    in_flight = config.max_num_batched_tokens * (2 if config.async_scheduling else 1)
    group: Group
    if spec.kind == "window":
        # One block more: the window may begin inside a block.
        most = -(-min(spec.span - 1 + in_flight, longest) // size) + 1
        group = window = WindowGroup(pool, rules, size, most, drops_last=drops_last)
        window.span = spec.span
    elif spec.kind == "chunk":
        most = -(-min(spec.span + in_flight, longest) // size)
        group = chunk = ChunkGroup(pool, rules, size, most, drops_last=drops_last)
        chunk.span = spec.span
    elif not spec.keeps_state:
        group = Group(pool, rules, size, UNLIMITED, drops_last=drops_last)
        group.sees_all = True
    elif config.enable_prefix_caching:
        group = state = StateGroup(pool, rules, size, UNLIMITED, drops_last=drops_last)
        state.stores_inside = spec.kind == "mamba2"
    else:  # without prefix caching a state never needs a second block
        group = Group(pool, rules, longest, UNLIMITED, drops_last=drops_last)
    return group
