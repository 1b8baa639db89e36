"""Hits of a cache with several KV groups, one request at a time, and the rule that took each token that did not hit.

A prompt's tokens up to its longest prefix seen before could hit. On the way they are lost to the block of a group, to
the common multiple of blocks, to the dropped last block, to windows and states that no group keeps, and to eviction.
The pool is the readable one: about a tenth of the compiled one's speed.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from measure.table import table_lines
from sim.vllm.config import EngineConfig
from sim.vllm.hybridscheduler import HybridScheduler
from sim.vllm.kvgroups import KvLayout, parse_groups, read_groups
from sim.vllm.request import Request
from sim.vllm.rules import blocks_for
from sim.workload.chain import Chains, finest_records
from tracefile.commandline.configfile import flag_of
from tracefile.files.reading import open_trace
from tracefile.records.errors import InputError

CHUNK_TOKENS = 8192
"""Tokens of a scheduler step: states are stored and windows freed where one ends."""
KEPT_SHARE = 0.95
CURVE_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Sizes of a curve, as shares of the blocks that an unlimited cache fills."""
OTHER_FLAGS = ("block_size", "block_sizes", "by", "sample", "object_lru", "cache_tokens", "model_config", "evict")
"""Flags of one group of full attention."""
COHORTS = ("turn 1", "turns 2+", "turn unknown")
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the cache sees it."""

    tokens: int
    output_tokens: int
    keys: list[int]
    """Of its match units, prompt and output."""
    seen_tokens: int
    """Leading tokens that an earlier request computed, to the trace's block."""
    scored: bool
    cohort: int

    @property
    def reachable(self) -> int:
        return min(self.seen_tokens, self.tokens - 1)


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
    seen_tokens: int = 0
    longest_seen: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    by_group: dict[str, Counter[str]] = field(default_factory=dict)
    cohorts: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def add(self, prompt: Prompt, causes: dict[str, int], blamed: dict[str, str]) -> None:
        self.input_tokens += prompt.tokens
        self.hit_tokens += causes["hit"]
        self.seen_tokens += prompt.reachable
        self.longest_seen = max(self.longest_seen, prompt.reachable)
        for counts in (self.tokens, self.cohorts.setdefault(COHORTS[prompt.cohort], Counter())):
            counts.update({"input": prompt.tokens, **causes})
        for cause, group in blamed.items():
            self.by_group.setdefault(cause, Counter())[group] += causes[cause]


class HybridPool:
    """The groups of ``layout`` over ``usable_blocks``, between requests."""

    def __init__(self, layout: KvLayout, usable_blocks: int) -> None:
        self.scheduler = HybridScheduler(
            EngineConfig(
                num_gpu_blocks=usable_blocks + 1,
                block_size=layout.match_unit,
                kv_groups=layout.name,
                max_num_batched_tokens=CHUNK_TOKENS,
                async_scheduling=False,
            )
        )

    def run(self, prompt: Prompt, reach: int = 0) -> tuple[int, str] | None:
        """Serve a request; return its hit tokens, and the group with the shortest hit if they are fewer than ``reach``.

        None: it does not fit the pool, and touches nothing.
        """
        scheduler, cache = self.scheduler, self.scheduler.cache
        request = Request("", prompt.tokens, prompt.output_tokens, prompt.keys, prompt_logprobs=prompt.scored)
        if not scheduler.accepts(request):
            return None
        cache.begin_step()
        hits = cache.look_up(request)
        blamed = "" if hits.tokens >= reach else min(cache.group_hits(request), key=lambda one: one[1])[0]
        at, held = hits.tokens, False
        while at < request.last_token - 1:
            end = self._step_end(request, at)
            held = cache.extend(request, end) if held else cache.admit(request, hits, end - at)
            if not held:
                cache.release(request)
                return None
            at = request.num_computed = end
            cache.end_step()
            cache.begin_step()
        cache.release(request)
        return hits.tokens, blamed

    def _step_end(self, request: Request, at: int) -> int:
        if at < request.prompt_tokens:
            return at + self.scheduler.clip(request, at, min(request.prompt_tokens - at, CHUNK_TOKENS))
        # Between two match units decoding changes nothing; the last step frees what the window has left.
        unit, last = self.scheduler.config.block_size, request.last_token - 1
        request.num_tokens = min((at // unit + 1) * unit, last if at == last - 1 else last - 1)
        return request.num_tokens


def read_prompts(path: Path, layout: KvLayout) -> tuple[list[Prompt], int]:
    """Requests of a trace with block hashes, and the trace's block size. Raises InputError if it is too coarse."""
    with open_trace(path) as reader:
        size = reader.meta.block_size or 1
        meta, records = finest_records(reader, size if layout.match_unit % size == 0 else 1)
        fine = Chains(meta)
        if layout.match_unit % fine.block_size:
            raise InputError(
                f"--kv-groups: {layout.name}: blocks of {layout.match_unit} tokens; expected multiples of the trace's "
                f"{fine.block_size}"
            )
        chains, seen, prompts = Chains(meta, layout.match_unit), set[int](), []
        for record in records:
            known, tokens = fine.whole(record), record.prompt_tokens or 0
            run = next((place for place, key in enumerate(known) if key not in seen), len(known))
            seen.update(known)
            prompts.append(
                Prompt(
                    tokens,
                    max(record.output_tokens or 1, 1),
                    chains.whole(record),
                    min(run * fine.block_size, tokens),
                    bool(record.prompt_logprobs),
                    2 if record.turn is None else min(record.turn, 2) - 1,
                )
            )
    return prompts, fine.block_size


class Unlimited(NamedTuple):
    """Result of a cache that never evicts."""

    hits: list[tuple[int, str]]
    """Of each request: hit tokens, and the group with the shortest hit if more could have been."""
    cached_blocks: int


def unlimited_hits(prompts: Sequence[Prompt], layout: KvLayout) -> Unlimited:
    most = sum(blocks_for(one.tokens + one.output_tokens, spec.block_size) for one in prompts for spec in layout.groups)
    pool = HybridPool(layout, most + 8 * len(layout.groups))
    hits = [pool.run(prompt, reach(prompt, layout)[-1]) or (0, "") for prompt in prompts]
    blocks = pool.scheduler.pool
    return Unlimited(hits, sum(blocks.key_of(block) is not None for block in range(blocks.num_gpu_blocks)))


def count_hits(
    prompts: Sequence[Prompt], layout: KvLayout, usable_blocks: int | None, unlimited: Unlimited
) -> HybridCounts:
    """Hits at one size, and causes of the rest."""
    counts = HybridCounts(kv_groups=layout.name, usable_blocks=usable_blocks)
    pool = None if usable_blocks is None else HybridPool(layout, usable_blocks)
    for prompt, most in zip(prompts, unlimited.hits, strict=True):
        counts.requests += 1
        found = most if pool is None else pool.run(prompt, most[0])
        if found is None:
            counts.rejected += 1
            continue
        counts.add(prompt, *attribute(prompt, layout, most, found))
    return counts


def reach(prompt: Prompt, layout: KvLayout) -> tuple[int, str, int, int]:
    """Tokens that could hit after rounding to the groups' blocks, the coarsest group, then after rounding to the common
    multiple, then after dropping the last block."""
    cached = [spec for spec in layout.groups if spec.kind != "ring"]
    unit = layout.match_unit
    sizes = {spec.name: unit if layout.partial_hits else spec.block_size for spec in cached}
    coarsest = min(sizes, key=lambda name: prompt.reachable // sizes[name] * sizes[name])
    rounded = prompt.reachable // sizes[coarsest] * sizes[coarsest]
    common = prompt.reachable // layout.alignment * layout.alignment
    dropping = [layout.groups[place] for place in layout.dropping]
    margins = [sizes[spec.name] for spec in dropping if not spec.keeps_state]
    kept = max(prompt.seen_tokens - max(margins, default=0), 0) // layout.alignment * layout.alignment
    return rounded, coarsest, common, min(common, kept) if margins else common


def attribute(
    prompt: Prompt, layout: KvLayout, most: tuple[int, str], found: tuple[int, str]
) -> tuple[dict[str, int], dict[str, str]]:
    """Prompt tokens by cause, and the groups that causes are due to."""
    rounded, coarsest, common, best = reach(prompt, layout)
    hits, possible = found[0], max(most[0], found[0])
    causes = dict.fromkeys(CAUSES, 0)
    causes["hit"] = hits
    if prompt.scored:
        causes["prompt_logprobs"] = prompt.seen_tokens
    elif hits <= best:
        causes["last_token"] = prompt.seen_tokens - prompt.reachable
        causes["block"] = prompt.reachable - rounded
        causes["common_multiple"] = rounded - common
        causes["dropped_block"] = common - best
        causes["not_kept"] = max(best - possible, 0)
        causes["evicted"] = min(possible, best) - hits
    causes["cold"] = prompt.tokens - sum(causes.values())
    blamed = {"block": coarsest, "not_kept": most[1], "evicted": found[1]}
    return causes, {cause: group for cause, group in blamed.items() if causes[cause]}


def run(arguments: argparse.Namespace, command: str, usable_blocks: int | None) -> int:
    """``sim pool``, ``misses`` and ``curve`` with ``--kv-groups``."""
    for name in OTHER_FLAGS:
        if getattr(arguments, name, None):
            raise InputError(f"{flag_of(name)}: given with --kv-groups; expected one of them")
    if getattr(arguments, "free_rule", "vllm") != "vllm":
        raise InputError("--free-rule: given with --kv-groups; expected one of them")
    layout = read_groups(arguments.kv_groups)
    prompts, block_size = read_prompts(arguments.trace, layout)
    unlimited = unlimited_hits(prompts, layout)
    found = [count_hits(prompts, layout, usable_blocks, unlimited)]
    if command == "curve":
        sizes = [max(int(unlimited.cached_blocks * share), 1) for share in CURVE_SHARES]
        found = [*(count_hits(prompts, layout, size, unlimited) for size in sizes), found[0]]
    told = advice(prompts, layout, found[-1], block_size)
    if arguments.json:
        names = [*HybridCounts.__dataclass_fields__, "hit_rate"]
        counts = [{name: getattr(one, name) for name in names} for one in found]
        print(
            json.dumps({"kind": f"hybrid {command}", "trace": str(arguments.trace), "counts": counts, "advice": told})
        )
        return 0
    lines = describe_sizes(found) if command == "curve" else describe(found[0], cohorts=command == "misses")
    print("\n".join([*lines, "", *told]))
    return 0


def advice(prompts: Sequence[Prompt], layout: KvLayout, counts: HybridCounts, block_size: int) -> list[str]:
    """Return what an engine could change: a smaller block, or windows and states kept everywhere."""
    if counts.rejected == counts.requests:
        return ["no request fits this pool"]
    if not counts.seen_tokens:
        return ["no prefix occurs twice: no cache could hit"]
    seen = f"{counts.seen_tokens / counts.input_tokens:.2%} of input tokens were seen before"
    told = [f"{seen}, at most {counts.longest_seen:,} in a row; a hit is a multiple of {layout.alignment:,}"]
    rounding = counts.tokens["block"] + counts.tokens["common_multiple"]
    if rounding > (1 - KEPT_SHARE) * counts.seen_tokens:
        sizes, size = [block_size], block_size
        while (size := size * 2) < layout.alignment:
            sizes.append(size)
        kept = {one: sum(prompt.reachable // one * one for prompt in prompts) for one in sizes}
        largest = max(one for one in sizes if kept[one] >= KEPT_SHARE * kept[block_size])
        now = sum(prompt.reachable // layout.alignment * layout.alignment for prompt in prompts)
        told.append(
            f"rounding keeps {now / counts.seen_tokens:.0%} of them; blocks of {largest:,} tokens in all groups "
            f"would keep {kept[largest] / counts.seen_tokens:.0%}"
        )
    if counts.tokens["not_kept"] > (1 - KEPT_SHARE) * counts.seen_tokens and layout.retain is not None:
        dense = sum(hits for hits, _ in unlimited_hits(prompts, replace(layout, retain=None)).hits)
        told.append(f"with retain=none an unlimited cache would hit {dense / counts.input_tokens:.2%}")
    return told


def describe(counts: HybridCounts, *, cohorts: bool) -> list[str]:
    size = "unlimited" if counts.usable_blocks is None else f"{counts.usable_blocks:,} usable blocks"
    lines = [
        f"{counts.kv_groups}, {size}: {counts.hit_tokens:,} of {counts.input_tokens:,} input tokens hit "
        f"({counts.hit_rate:.2%}), {counts.requests:,} requests"
    ]
    if counts.rejected:
        lines.append(f"{counts.rejected:,} requests do not fit the pool and were left out")
    shown = [cause for cause in CAUSES if counts.tokens[cause] or cause == "hit"]
    names = list(counts.cohorts) if cohorts and len(counts.cohorts) > 1 else []
    rows = []
    for cause in shown:
        groups = [f"{name} {tokens:,}" for name, tokens in counts.by_group.get(cause, Counter()).most_common()]
        shares = [
            f"{one[cause] / (one['input'] or 1):.2%}"
            for one in (counts.tokens, *map(counts.cohorts.__getitem__, names))
        ]
        rows.append([CAUSES[cause], f"{counts.tokens[cause]:,}", *shares, ", ".join(groups) or "–"])
    return lines + table_lines(["cause", "tokens", "% of input", *names, "groups"], rows, "<")


def told_losses(path: Path, config: EngineConfig) -> str:
    """Return a line on the hits of an engine's groups, what took the rest, and what would not."""
    layout = parse_groups(config.kv_groups or "")
    prompts, block_size = read_prompts(path, layout)
    counts = count_hits(prompts, layout, config.usable_blocks, unlimited_hits(prompts, layout))
    whole = counts.input_tokens or 1
    groups = {cause: ", ".join(counts.by_group.get(cause, ())) or "all groups" for cause in CAUSES}
    lost = [
        f"{CAUSES[cause]} {counts.tokens[cause] / whole:.2%} ({groups[cause]})"
        for cause in ("block", "common_multiple", "dropped_block", "not_kept", "evicted")
        if counts.tokens[cause]
    ]
    told = f"{layout.name}, requests one at a time: {counts.hit_rate:.2%} hit; lost: {', '.join(lost) or 'nothing'}"
    return "; ".join([told, *advice(prompts, layout, counts, block_size)[1:]])


def describe_sizes(found: Sequence[HybridCounts]) -> list[str]:
    last = found[-1]
    causes = [cause for cause in CAUSES if cause != "hit" and any(counts.tokens[cause] for counts in found)]
    headings = ["usable blocks", "hit rate", *(CAUSES[cause] for cause in causes), "left out", "evicted by group"]
    rows = []
    for counts in found:
        size = "unlimited" if counts.usable_blocks is None else f"{counts.usable_blocks:,}"
        shares = [f"{counts.tokens[cause] / (counts.input_tokens or 1):.2%}" for cause in causes]
        groups = [f"{name} {tokens:,}" for name, tokens in counts.by_group.get("evicted", Counter()).most_common()]
        rows.append([size, f"{counts.hit_rate:.2%}", *shares, f"{counts.rejected:,}", ", ".join(groups) or "–"])
    lines = [f"{last.kv_groups}: {last.input_tokens:,} input tokens of {last.requests:,} requests"]
    return lines + table_lines(headings, rows, "<")
