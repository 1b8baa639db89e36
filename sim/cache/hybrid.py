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
from measure.cache.vectors import integers
from measure.table import table_lines
from sim.cache.sequential_pool import Records, lay_out
from sim.vllm.config import EngineConfig
from sim.vllm.hybridcache import HybridCache, serve_alone
from sim.vllm.hybridgroups import make_hybrid_cache
from sim.vllm.kvgroups import KvLayout, read_groups
from sim.vllm.request import ANY_HITS, Request
from sim.vllm.rules import blocks_for
from sim.workload.chain import Chains, finest_records
from tracefile.commandline.configfile import refuse_beside
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray, UInt64Array
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


class Prompts(NamedTuple):
    """Requests as the cache sees them, and the keys of their match units."""

    requests: Records
    keys: UInt64Array
    tokens: IntArray
    last_token: IntArray
    """Tokens of prompt and output."""
    seen_tokens: IntArray
    """Leading tokens that an earlier request computed, to the trace's block."""
    block_size: int
    """The trace's."""

    @property
    def reachable(self) -> IntArray:
        return np.minimum(self.seen_tokens, self.tokens - 1)


class Hits(NamedTuple):
    """Result of a pool."""

    tokens: IntArray
    """Hit tokens of each request; −1: it does not fit the pool, and touches nothing."""
    form: IntArray
    """Where more could have hit, the form of groups that had the shortest hit, by its place in ``names_of``."""
    evicted: bool


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


def read_prompts(path: Path, layout: KvLayout) -> Prompts:
    """Requests of a trace with block hashes. Raises InputError if it is too coarse."""
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
    hashes = batch.hashes()
    finest, laid_out = lay_out(batch, hashes, fine), lay_out(batch, hashes, Chains(meta, unit))
    interner, known = Interner(), finest.requests["known_keys"]
    numbers = interner.number(finest.keys)
    run = unlimited_hits(numbers, np.append(0, np.cumsum(known)), known, interner.distinct)
    return Prompts(
        laid_out.requests,
        laid_out.keys,
        laid_out.prompt_tokens,
        laid_out.computed_tokens + 1,
        np.minimum(run * fine.block_size, laid_out.prompt_tokens),
        fine.block_size,
    )


def empty_cache(layout: KvLayout, usable_blocks: int) -> HybridCache:
    """Return a cache that serves requests one at a time."""
    config = EngineConfig(
        num_gpu_blocks=usable_blocks + 1,
        block_size=layout.match_unit,
        kv_groups=layout.name,
        max_num_batched_tokens=CHUNK_TOKENS,
        async_scheduling=False,
    )
    return make_hybrid_cache(config)


def run_pool(prompts: Prompts, cache: HybridCache, reach: IntArray, *, stops: bool = False) -> Hits:
    """Serve the requests one at a time; ``reach``: tokens that could hit; ``stops``: return at the first eviction."""
    keys, rows = integers(prompts.keys), prompts.requests
    columns = (prompts.tokens, prompts.last_token, *(rows[name] for name in ("first_key", "known_keys")))
    each = zip(*(column.tolist() for column in columns), (rows["prompt_logprobs"] > 0).tolist(), strict=True)
    requests = [
        Request(
            "",
            tokens,
            last - tokens,
            keys,
            first_key=first,
            known_keys=known,
            index=index,
            hit_limit=0 if scored else ANY_HITS,
        )
        for index, (tokens, last, first, known, scored) in enumerate(each)
    ]
    hits, forms = serve_alone(cache, requests, reach.tolist(), stops)
    return Hits(np.array(hits, np.int64), np.array(forms, np.int64), cache.pool.evicted_blocks > 0)


def unlimited(prompts: Prompts, layout: KvLayout) -> Hits:
    """Hits of a cache that never evicts."""
    requests, reached = prompts.requests, reach(prompts, layout)[-1]
    distinct, units = Interner(), prompts.last_token // layout.match_unit
    distinct.number(prompts.keys)
    tokens = (distinct.distinct + int((units - requests["known_keys"]).sum())) * layout.match_unit
    longest, spare = int(prompts.last_token.max(initial=1)), 4 * len(requests) + 8
    blocks = sum(blocks_for(max(tokens, longest), group.block_size) + spare for group in layout.groups)
    while (found := run_pool(prompts, empty_cache(layout, blocks), reached, stops=True)).evicted:
        blocks *= 2
    return found


def count_hits(prompts: Prompts, layout: KvLayout, usable_blocks: int | None, most: Hits) -> HybridCounts:
    """Hits at one size, and causes of the rest; ``most``: of an unlimited cache."""
    found = most if usable_blocks is None else run_pool(prompts, empty_cache(layout, usable_blocks), most.tokens)
    fits = found.tokens >= 0
    causes, blamed = attribute(prompts, layout, most, found)
    counts = HybridCounts(kv_groups=layout.name, usable_blocks=usable_blocks, requests=len(fits))
    counts.rejected = int((~fits).sum())
    counts.input_tokens, counts.hit_tokens = int(prompts.tokens[fits].sum()), int(causes["hit"][fits].sum())
    every = {"input": prompts.tokens, **causes}
    counts.tokens = Counter({name: int(tokens[fits].sum()) for name, tokens in every.items()})
    for name, (names, form) in blamed.items():
        of_form = [int(causes[name][fits & (form == number)].sum()) for number in range(len(names))]
        if any(of_form):
            counts.by_group[name] = Counter({group: lost for group, lost in zip(names, of_form, strict=True) if lost})
    return counts


def reach(prompts: Prompts, layout: KvLayout) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Tokens that could hit after rounding to the groups' blocks, the coarsest group, then after rounding to the common
    multiple, then after dropping the last block."""
    unit, reachable = layout.match_unit, prompts.reachable
    sizes = {spec.name: unit if layout.partial_hits else spec.block_size for spec in layout.groups}
    each = np.stack([reachable // sizes[name] * sizes[name] for name in names_of(layout)])
    common = reachable // layout.alignment * layout.alignment
    dropping = [layout.groups[place] for place in layout.dropping]
    margin = max((sizes[spec.name] for spec in dropping if not spec.keeps_state), default=0)
    kept = np.maximum(prompts.seen_tokens - margin, 0) // layout.alignment * layout.alignment
    return each.min(axis=0), each.argmin(axis=0), common, np.minimum(common, kept) if margin else common


def attribute(
    prompts: Prompts, layout: KvLayout, most: Hits, found: Hits
) -> tuple[dict[str, IntArray], dict[str, tuple[list[str], IntArray]]]:
    """Prompt tokens by cause, and of causes that a group decides, the groups' names and the place of each request's."""
    rounded, coarsest, common, best = reach(prompts, layout)
    seen, hits = prompts.seen_tokens, found.tokens
    possible = np.maximum(most.tokens, hits)
    scored = prompts.requests["prompt_logprobs"] > 0
    lost = {
        "block": prompts.reachable - rounded,
        "common_multiple": rounded - common,
        "dropped_block": common - best,
        "not_kept": np.maximum(best - possible, 0),
        "evicted": np.minimum(possible, best) - hits,
        "last_token": seen - prompts.reachable,
    }
    counted = ~scored & (hits <= best)
    causes = {"hit": hits, **{name: np.where(counted, tokens, 0) for name, tokens in lost.items()}}
    causes["prompt_logprobs"] = np.where(scored, seen, 0)
    causes = {"hit": hits, "cold": prompts.tokens - sum(causes.values()), **causes}
    names = names_of(layout)
    blamed = {"block": (names, coarsest), "not_kept": (names, most.form), "evicted": (names, found.form)}
    return {name: causes[name] for name in CAUSES}, blamed


def run(arguments: argparse.Namespace, usable_blocks: int | None) -> int:
    """``sim pool`` with ``--kv-groups``."""
    refuse_beside("--kv-groups", arguments, OTHER_FLAGS)
    layout = read_groups(arguments.kv_groups)
    prompts = read_prompts(arguments.trace, layout)
    most = unlimited(prompts, layout)
    found = count_hits(prompts, layout, usable_blocks, most)
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
