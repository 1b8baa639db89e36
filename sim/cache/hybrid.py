"""Hits of a cache with several KV groups, one request at a time, and the rule that took each token that did not hit.

A prompt's tokens up to its longest prefix seen before could hit. On the way they are lost to the block of a group, to
the common multiple of blocks, to the dropped last block, to windows and states that no group keeps, and to eviction.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from measure.cache.interning import Interner, unlimited_hits
from measure.table import table_lines
from sim.vllm.config import MOST, EngineConfig
from sim.vllm.hybridcache import HybridCache
from sim.vllm.hybridgroups import make_hybrid_cache
from sim.vllm.kvgroups import KvLayout, read_groups
from sim.workload.chain import Chains, finest_records
from sim.workload.prompts import Prompts, lay_out
from tracefile.commandline.configfile import refuse_beside
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.batches import Batch
from tracefile.records.errors import InputError

CHUNK_TOKENS = 8192
"""Tokens of a scheduler step: states are stored and windows freed where one ends."""
OTHER_FLAGS = ("block_size", "bound")
"""Flags of one group of full attention."""
CAUSES = {
    "hit": "hit",
    "cold": "never seen before",
    "block": "rounding to the block",
    "common_multiple": "rounding to the common multiple",
    "dropped_block": "last block dropped",
    "not_kept": "window or state not kept",
    "evicted": "evicted",
    "last_token": "last token",
    "prompt_logprobs": "prompt log probabilities",
}


class Hits(NamedTuple):
    """Result of a pool."""

    tokens: IntArray
    """Hit tokens of each request; −1: it does not fit the pool, and touches nothing."""
    form: IntArray
    """Where more could have hit, the form of groups that had the shortest hit, by its place in ``names_of``."""


@dataclass(slots=True, kw_only=True)
class HybridCounts:
    """Prompt tokens by cause; of rounding, windows and eviction also by the group that decided."""

    kv_groups: str
    usable_blocks: int | None
    """Null: unlimited."""
    requests: int = 0
    rejected: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    by_group: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def names_of(layout: KvLayout) -> list[str]:
    """Names of the forms of groups, those of full attention first."""
    forms = dict.fromkeys(layout.groups)
    return [group.name for group in sorted(forms, key=lambda group: not group.sees_all)]


def read_hybrid(path: Path, layout: KvLayout) -> tuple[Prompts, IntArray]:
    """Return a trace's prompts in blocks of the match unit, and the leading tokens of each that an earlier request
    computed, to the trace's block. Raises InputError if the trace is too coarse."""
    with open_trace(path) as reader:
        size, unit = reader.meta.block_size or 1, layout.match_unit
        meta, records = finest_records(reader, size if unit % size == 0 else 1)
        fine = Chains(meta)
        if unit % fine.block_size:
            raise InputError(
                f"--kv-groups: {layout.name}: blocks of {unit} tokens; expected multiples of the trace's "
                f"{fine.block_size}"
            )
        batch = Batch(list(records))
    finest, interner = lay_out(batch, batch.hashes(), fine), Interner()
    numbers = interner.number(finest.keys)
    run = unlimited_hits(numbers, finest.starts, finest.known, interner.distinct)
    seen_tokens = np.minimum(run * fine.block_size, finest.prompt_tokens)
    return lay_out(batch, batch.hashes(), Chains(meta, unit)), seen_tokens


def run_pool(prompts: Prompts, layout: KvLayout, usable_blocks: int | None, reach: IntArray) -> Hits:
    """Serve the requests one at a time; ``reach``: tokens that could hit."""
    cache, hits, forms = empty_cache(layout, usable_blocks), [], []
    for request, most in zip(prompts.requests(), reach.tolist(), strict=True):
        forms.append(cache.shortest_form(request) if cache.look_up(request) < most else 0)
        hits.append(cache.serve_alone(request))
    return Hits(np.array(hits, np.int64), np.array(forms, np.int64))


def empty_cache(layout: KvLayout, usable_blocks: int | None) -> HybridCache:
    """Return a cache that serves requests one at a time; None: one that never evicts."""
    config = EngineConfig(
        num_gpu_blocks=MOST if usable_blocks is None else usable_blocks + 1,
        block_size=layout.match_unit,
        kv_groups=layout.name,
        max_num_batched_tokens=CHUNK_TOKENS,
        async_scheduling=False,
    )
    return make_hybrid_cache(config)


def unlimited(prompts: Prompts, seen_tokens: IntArray, layout: KvLayout) -> Hits:
    """Hits of a cache that never evicts."""
    return run_pool(prompts, layout, None, reach(prompts, seen_tokens, layout)[-1])


def count_hits(prompts: Prompts, seen_tokens: IntArray, layout: KvLayout, usable_blocks: int | None) -> HybridCounts:
    """Hits at one size, and causes of the rest."""
    most = unlimited(prompts, seen_tokens, layout)
    found = most if usable_blocks is None else run_pool(prompts, layout, usable_blocks, most.tokens)
    fits = found.tokens >= 0
    causes, blamed = attribute(prompts, seen_tokens, layout, most, found)
    counts = HybridCounts(kv_groups=layout.name, usable_blocks=usable_blocks, requests=len(fits))
    counts.rejected = int((~fits).sum())
    counts.input_tokens, counts.hit_tokens = int(prompts.prompt_tokens[fits].sum()), int(causes["hit"][fits].sum())
    every = {"input": prompts.prompt_tokens, **causes}
    counts.tokens = Counter({name: int(tokens[fits].sum()) for name, tokens in every.items()})
    for name, (names, form) in blamed.items():
        of_form = [int(causes[name][fits & (form == number)].sum()) for number in range(len(names))]
        if any(of_form):
            counts.by_group[name] = Counter({group: lost for group, lost in zip(names, of_form, strict=True) if lost})
    return counts


def reach(prompts: Prompts, seen_tokens: IntArray, layout: KvLayout) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Tokens that could hit after rounding to the groups' blocks, the coarsest group, then after rounding to the common
    multiple, then after dropping the last block."""
    unit, reachable = layout.match_unit, np.minimum(seen_tokens, prompts.prompt_tokens - 1)
    sizes = {spec.name: unit if layout.partial_hits else spec.block_size for spec in layout.groups}
    each = np.stack([reachable // sizes[name] * sizes[name] for name in names_of(layout)])
    common = reachable // layout.alignment * layout.alignment
    dropping = [layout.groups[place] for place in layout.dropping]
    margin = max((sizes[spec.name] for spec in dropping if not spec.keeps_state), default=0)
    kept = np.maximum(seen_tokens - margin, 0) // layout.alignment * layout.alignment
    return each.min(axis=0), each.argmin(axis=0), common, np.minimum(common, kept) if margin else common


def attribute(
    prompts: Prompts, seen_tokens: IntArray, layout: KvLayout, most: Hits, found: Hits
) -> tuple[dict[str, IntArray], dict[str, tuple[list[str], IntArray]]]:
    """Prompt tokens by cause, and of causes that a group decides, the groups' names and the place of each request's."""
    rounded, coarsest, common, best = reach(prompts, seen_tokens, layout)
    reachable, hits = np.minimum(seen_tokens, prompts.prompt_tokens - 1), found.tokens
    possible = np.maximum(most.tokens, hits)
    scored = prompts.unread > 0
    lost = {
        "block": reachable - rounded,
        "common_multiple": rounded - common,
        "dropped_block": common - best,
        "not_kept": np.maximum(best - possible, 0),
        "evicted": np.minimum(possible, best) - hits,
        "last_token": seen_tokens - reachable,
    }
    counted = ~scored & (hits <= best)
    causes = {"hit": hits, **{name: np.where(counted, tokens, 0) for name, tokens in lost.items()}}
    causes["prompt_logprobs"] = np.where(scored, seen_tokens, 0)
    causes = {"hit": hits, "cold": prompts.prompt_tokens - sum(causes.values()), **causes}
    names = names_of(layout)
    blamed = {"block": (names, coarsest), "not_kept": (names, most.form), "evicted": (names, found.form)}
    return {name: causes[name] for name in CAUSES}, blamed


def run(arguments: argparse.Namespace, usable_blocks: int | None) -> int:
    """``sim pool`` with ``--kv-groups``."""
    refuse_beside("--kv-groups", arguments, OTHER_FLAGS)
    layout = read_groups(arguments.kv_groups)
    found = count_hits(*read_hybrid(arguments.trace, layout), layout, usable_blocks)
    if arguments.json:
        counts = {name: getattr(found, name) for name in (*HybridCounts.__dataclass_fields__, "hit_rate")}
        print(json.dumps({"kind": "hybrid pool", "trace": str(arguments.trace), "counts": counts}))
        return 0
    print("\n".join(describe(found)))
    return 0


def describe(counts: HybridCounts) -> list[str]:
    size = "unlimited" if counts.usable_blocks is None else f"{counts.usable_blocks:,} usable blocks"
    lines = [
        f"{counts.kv_groups}, {size}: {counts.hit_tokens:,} of {counts.input_tokens:,} input tokens hit "
        f"({counts.hit_rate:.2%}), {counts.requests:,} requests"
    ]
    if counts.rejected:
        lines.append(f"{counts.rejected:,} requests do not fit the pool and were left out")
    shown = [cause for cause in CAUSES if counts.tokens[cause] or cause == "hit"]
    rows = []
    for cause in shown:
        groups = [f"{name} {tokens:,}" for name, tokens in counts.by_group.get(cause, Counter()).most_common()]
        share = f"{counts.tokens[cause] / (counts.input_tokens or 1):.2%}"
        rows.append([CAUSES[cause], f"{counts.tokens[cause]:,}", share, ", ".join(groups) or "–"])
    return lines + table_lines(["cause", "tokens", "% of input", "groups"], rows, "<")
