"""``sim pool``: prefix hits of a trace in a block pool of one size, one request at a time in file order.

No time passes and no requests overlap, so the hits measure the cache alone: each request looks up its prompt, allocates
the missing blocks, fills them up to its last token, and frees them before the next request. llama.cpp's requests run at
their recorded times: a slot serves one request, and the idle slots depend on all running requests.
"""

import argparse
import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from sim.cache.belady import BeladyPool
from sim.llamacpp.config import SlotConfig, slot_config
from sim.llamacpp.slots import Chain, Slot, SlotCache
from sim.sglang.config import RadixConfig, radix_config
from sim.sglang.radix import RadixPool
from sim.vllm.config import MOST, EngineConfig
from sim.vllm.hybridcache import HybridCache
from sim.vllm.hybridgroups import make_hybrid_cache
from sim.vllm.kvcache import DOES_NOT_FIT, KVCache, single_group_cache
from sim.vllm.kvgroups import KvLayout, read_groups
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import (
    Chains,
    engine_chains,
    finest_records,
    hashed_batches,
    in_file_order,
    tokens_computed,
)
from sim.workload.prompts import Prompts, lay_out, read_prompts
from tracefile.commandline.configfile import given_flags, refuse_beside
from tracefile.files.reading import TraceReader, open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.batches import Batch
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


@dataclass(slots=True, kw_only=True)
class HitCounts:
    """Prefix hits of a cache. Rates are shares of input tokens; counts exclude ``rejected`` requests."""

    requests: int = 0
    """Records with a prompt length."""
    rejected: int = 0
    """Requests that alone do not fit the pool: vLLM rejects them, so they touch no block."""
    input_tokens: int = 0
    lookup_blocks: int = 0
    """Full prompt blocks: an upper bound of the hits."""
    hit_blocks: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    """Blocks evicted for another request."""
    block_size: int = 0
    usable_blocks: int | None = None
    """Null: unlimited."""
    compared: int = 0
    """SGLang and llama.cpp: requests with cached tokens in the trace."""
    as_reported: int = 0
    """Compared requests with an equal prefix hit here, rounded to the trace's block."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def size(self) -> str:
        return size_text(self.usable_blocks, self.block_size)

    def count_tokens(self, record: Record, hit_tokens: int) -> None:
        """Count a request, whose prefix hit may end inside a block."""
        tokens = record.prompt_tokens or 0
        self.input_tokens += tokens
        self.lookup_blocks += tokens // self.block_size
        self.hit_blocks += hit_tokens // self.block_size
        self.hit_tokens += hit_tokens
        if record.cached_tokens is not None:
            self.compared += 1
            self.as_reported += record.cached_tokens // self.block_size == hit_tokens // self.block_size


@dataclass(slots=True, kw_only=True)
class GroupCounts(HitCounts):
    """Prefix hits of several KV groups. Hits are in match units, the block pool in blocks of the groups."""

    kv_groups: str
    alignment: int
    """Granularity of a prefix hit, in tokens."""

    @property
    def size(self) -> str:
        pool = "unlimited" if self.usable_blocks is None else f"{self.usable_blocks:,} usable blocks"
        return f"{self.kv_groups}, {pool}, hits of multiples of {self.alignment} tokens"


@dataclass(slots=True, kw_only=True)
class RadixCounts(HitCounts):
    """Prefix hits of SGLang's radix cache. Blocks are the trace's, or pages if larger."""

    evicted_tokens: int = 0
    evicted_nodes: int = 0
    """Evicted radix nodes; eviction removes complete nodes."""
    kv_tokens: int | None = None
    """KV cache capacity, in tokens; null: unlimited."""
    page_size: int = 1

    @property
    def size(self) -> str:
        return "unlimited" if self.kv_tokens is None else f"{self.kv_tokens:,} tokens in pages of {self.page_size}"


@dataclass(slots=True, kw_only=True)
class SlotCounts(HitCounts):
    """Prefix hits of llama.cpp's slots and prompt cache."""

    evicted_tokens: int = 0
    settings: SlotConfig

    @property
    def size(self) -> str:
        limit = self.settings.cache_ram_tokens
        size = "unlimited" if limit is None else f"{limit:,} tokens"
        return f"{self.settings.slots} slots, prompt cache: {size}"


CHUNK_TOKENS = 8192
"""Token budget of a scheduler step with KV groups: states are stored and window blocks freed where a step ends."""
ENGINE_FLAGS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("kv_groups", "bound"),
    "sglang": ("kv_tokens", "page_size", "chunked_prefill_size"),
    "llamacpp": tuple(SlotConfig.__dataclass_fields__),
}
"""Flags that apply to one engine only."""


def run(arguments: argparse.Namespace) -> int:
    counts = count_trace_hits(arguments)
    print(json.dumps({**asdict(counts), "hit_rate": counts.hit_rate}) if arguments.json else describe(counts))
    return 0


def count_trace_hits(arguments: argparse.Namespace) -> HitCounts:
    """Run the complete trace through the prefix cache that the flags select."""
    usable_blocks, block_size = parse_usable_blocks(arguments.num_gpu_blocks), parse_block_size(arguments.block_size)
    refuse_other_engines(arguments)
    with open_trace(arguments.trace) as reader:
        if arguments.kv_groups is not None:
            refuse_beside("--kv-groups", arguments, ("block_size", "bound"))
            return count_group_hits(reader, read_groups(arguments.kv_groups), usable_blocks)
        refuse_other_attention(reader.meta, arguments.trace)
        if arguments.engine == "sglang":
            radix = radix_config(arguments)
            meta, records = finest_records(reader, radix.page_size)
            return count_radix_hits(records, page_chains(meta, radix.page_size, block_size), radix, usable_blocks)
        if arguments.engine == "llamacpp":
            meta, records = finest_records(reader, 1)
            return count_slot_hits(records, Chains(meta, block_size), slot_config(arguments, meta.engine))
        chains = engine_chains(reader.meta, block_size)
        prompts = read_prompts(in_file_order(hashed_batches(reader)), chains)
        return count_pool_hits(prompts, usable_blocks, bound=arguments.bound)


def refuse_other_engines(arguments: argparse.Namespace) -> None:
    """Raise InputError for a flag of another engine."""
    for engine, names in ENGINE_FLAGS.items():
        flags = given_flags(arguments, names)
        if flags and engine != arguments.engine:
            raise InputError(
                f"{', '.join(flags)}: only with --engine {engine}; expected without --engine {arguments.engine}"
            )
    if arguments.engine == "llamacpp" and arguments.num_gpu_blocks != "inf":
        raise InputError("--num-gpu-blocks: llama.cpp has no pool of blocks; expected --slots and --cache-ram-tokens")


def count_pool_hits(prompts: Prompts, usable_blocks: int | None, *, bound: bool = False) -> HitCounts:
    """Return hits in vLLM's block pool (rules 1 to 11 of docs/simulator.md); ``bound``: under the best eviction."""
    if not bound:
        cache = single_group_cache(prompts.block_size, usable_blocks)
        return HitCounts(usable_blocks=usable_blocks, **_served_alone(prompts, cache))
    fits = prompts.fit(usable_blocks)
    pool, hit_tokens = BeladyPool(prompts.select(fits), usable_blocks), np.full(len(fits), DOES_NOT_FIT)
    hit_tokens[fits] = pool.run() * prompts.block_size
    return HitCounts(usable_blocks=usable_blocks, **_counts(prompts, hit_tokens, pool.evicted_blocks))


def count_group_hits(reader: TraceReader, layout: KvLayout, usable_blocks: int | None) -> GroupCounts:
    """Return hits of KV groups, prefilled in chunks of CHUNK_TOKENS. Raises InputError for too large trace blocks."""
    size, unit = reader.meta.block_size or 1, layout.match_unit
    meta, records = finest_records(reader, size if unit % size == 0 else 1)
    if unit % (meta.block_size or unit):
        raise InputError(
            f"--kv-groups: {layout.name}: blocks of {unit} tokens; expected multiples of the trace's {meta.block_size}"
        )
    batch = Batch(list(records))
    prompts = lay_out(batch, batch.hashes(), Chains(meta, unit))
    counts = _served_alone(prompts, empty_group_cache(layout, usable_blocks))
    return GroupCounts(usable_blocks=usable_blocks, kv_groups=layout.name, alignment=layout.alignment, **counts)


def empty_group_cache(layout: KvLayout, usable_blocks: int | None) -> HybridCache:
    """Return an empty KV cache of KV groups; ``usable_blocks`` None: a cache that never evicts."""
    config = EngineConfig(
        num_gpu_blocks=MOST if usable_blocks is None else usable_blocks + 1,
        block_size=layout.match_unit,
        kv_groups=layout.name,
        max_num_batched_tokens=CHUNK_TOKENS,
        async_scheduling=False,
    )
    return make_hybrid_cache(config)


def _served_alone(prompts: Prompts, cache: KVCache) -> dict[str, int]:
    hit_tokens = np.fromiter((cache.serve_alone(request) for request in prompts.requests()), np.int64, len(prompts))
    return _counts(prompts, hit_tokens, int(cache.evicted_blocks()))


def _counts(prompts: Prompts, hit_tokens: IntArray, evicted_blocks: int) -> dict[str, int]:
    """Return fields of ``HitCounts``; ``hit_tokens``: prefix hit of each request, or DOES_NOT_FIT."""
    fits, size = hit_tokens != DOES_NOT_FIT, prompts.block_size
    return {
        "block_size": size,
        "requests": len(prompts),
        "rejected": int((~fits).sum()),
        "input_tokens": int(prompts.prompt_tokens[fits].sum()),
        "lookup_blocks": int((prompts.prompt_tokens[fits] // size).sum()),
        "hit_blocks": int((hit_tokens[fits] // size).sum()),
        "hit_tokens": int(hit_tokens[fits].sum()),
        "evicted_blocks": evicted_blocks,
    }


def page_chains(meta: Meta, page_size: int, block_size: int | None) -> Chains:
    """Return chains at the larger of block and page size. Raises InputError unless a size divides the other."""
    size = block_size or meta.block_size
    if size is not None and page_size % size and size % page_size:
        raise InputError(
            f"--page-size: {page_size} neither divides blocks of {size} tokens nor is a multiple of them; "
            f"expected 1, {size} or {2 * size}, for example"
        )
    return Chains(meta, max(page_size, size) if size else None)


def count_radix_hits(
    records: Iterable[Record], chains: Chains, config: RadixConfig, blocks: int | None = None
) -> RadixCounts:
    """Return hits in SGLang's radix cache of ``config``, or of ``blocks`` blocks, one request at a time."""
    size = chains.block_size
    if config.max_total_num_tokens is None and blocks is not None:
        config = replace(config, max_total_num_tokens=blocks * size)
    capacity = config.max_total_num_tokens
    pool = RadixPool(config, size)
    counts = RadixCounts(
        block_size=size,
        usable_blocks=None if capacity is None else capacity // size,
        kv_tokens=capacity,
        page_size=config.page_size,
    )
    for record in records:
        counts.requests += 1
        prompt, computed = record.prompt_tokens or 0, tokens_computed(record)
        if not pool.fits(prompt, record.output_tokens or 0):
            counts.rejected += 1
            continue
        scored = bool(record.prompt_logprobs)
        hit = pool.run(chains.block_keys(record), prompt, computed, prompt_logprobs=scored)
        counts.count_tokens(record, hit)
    counts.evicted_nodes = pool.tree.evicted_nodes
    counts.evicted_tokens = pool.tree.evicted_tokens
    counts.evicted_blocks = counts.evicted_tokens // size
    return counts


def count_slot_hits(records: Iterable[Record], chains: Chains, config: SlotConfig) -> SlotCounts:
    """Return hits in llama.cpp's slots at recorded times; a request waits while all slots are busy."""
    counts = SlotCounts(block_size=chains.block_size, settings=config)
    cache = SlotCache(config, chains.block_size)
    running: list[tuple[float, int, Slot, Chain]] = []
    for number, record in enumerate(sorted(records, key=lambda record: record.arrival_ms or 0.0)):
        arrival_ms, prompt = record.arrival_ms or 0.0, record.prompt_tokens or 0
        sequence = Chain(chains.block_keys(record), tokens_computed(record))
        prompt_chain = Chain(sequence.keys[: -(-prompt // chains.block_size)], prompt)
        while running and running[0][0] <= arrival_ms:
            cache.end(*heapq.heappop(running)[2:])
        while (started := cache.start(prompt_chain)) is None:
            cache.end(*heapq.heappop(running)[2:])
        slot, hits = started
        heapq.heappush(running, (arrival_ms + (record.e2e_ms or 0.0), number, slot, sequence))
        counts.requests += 1
        counts.count_tokens(record, hits)
    counts.evicted_tokens = cache.evicted_tokens
    counts.evicted_blocks = counts.evicted_tokens // chains.block_size
    return counts


def parse_usable_blocks(text: str) -> int | None:
    """Parse ``--num-gpu-blocks`` to usable blocks, without the null block; ``inf``: None. Raises InputError."""
    if text.lower() in {"inf", "infinite", "unlimited"}:
        return None
    try:
        blocks = int(text)
    except ValueError:
        blocks = 0
    if not 2 <= blocks <= MOST:
        raise InputError(f"--num-gpu-blocks: {text!r}; expected 2 to {MOST} blocks, the null block included, or inf")
    return blocks - 1


def parse_block_size(block_size: int | None) -> int | None:
    if block_size is not None and not 1 <= block_size <= MOST:
        raise InputError(f"--block-size: {block_size}; expected 1 to {MOST} tokens")
    return block_size


def block_size_text(block_size: int, fine_block_size: int) -> str:
    """Return the block size as text, with the number of trace blocks in it if they differ."""
    multiple = "" if block_size == fine_block_size else f" ({block_size // fine_block_size} trace blocks)"
    return f"{block_size} tokens{multiple}"


def size_text(usable_blocks: int | None, block_size: int) -> str:
    return "unlimited" if usable_blocks is None else f"{usable_blocks:,} usable blocks of {block_size} tokens"


def describe(counts: HitCounts) -> str:
    lines = [
        f"{counts.size}: {counts.hit_tokens:,} of {counts.input_tokens:,} input tokens hit ({counts.hit_rate:.2%})",
        f"{counts.hit_blocks:,} of {counts.lookup_blocks:,} full prompt blocks, {counts.evicted_blocks:,} evicted, "
        f"{counts.requests:,} requests",
    ]
    if counts.compared:
        unit = "the token" if counts.block_size == 1 else f"blocks of {counts.block_size} tokens, as the trace has them"
        lines.append(f"hits as reported: {counts.as_reported:,} of {counts.compared:,} requests, to {unit}")
    if counts.rejected:
        lines.append(f"{counts.rejected:,} requests do not fit the pool; not counted")
    return "\n".join(lines)
