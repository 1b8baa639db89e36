"""``sim pool``: a trace's prefix hits in a block pool of one size, requests one at a time in file order.

No time passes and nothing runs at once, so the hits are what the cache alone is worth to the traffic: each request
looks its prompt up, takes the blocks it lacks, fills them to its last token, and frees them before the next one comes.
llama.cpp's requests run at their times: a slot is one request's, and the idle ones depend on all that run.
"""

import argparse
import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from sim.cache import hybrid
from sim.cache.belady import BeladyPool
from sim.llamacpp.config import SlotConfig, slot_config
from sim.llamacpp.slots import Chain, Slot, SlotCache
from sim.sglang.config import RadixConfig, radix_config
from sim.sglang.radix import RadixPool
from sim.vllm.config import MOST
from sim.vllm.kvcache import single_group_cache
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import (
    Chains,
    engine_chains,
    finest_records,
    hashed_batches,
    in_file_order,
    tokens_computed,
)
from sim.workload.prompts import read_prompts
from tracefile.commandline.configfile import given_flags
from tracefile.files.reading import TraceReader, open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


@dataclass(slots=True, kw_only=True)
class HitCounts:
    """Hits of a cache. Rates are of input tokens; all counts are over ``requests`` less ``rejected``."""

    requests: int = 0
    """Records with a prompt length."""
    rejected: int = 0
    """Requests that alone do not fit the pool: vLLM could never run them, so they touch nothing."""
    input_tokens: int = 0
    lookup_blocks: int = 0
    """Full prompt blocks: the hits of an unlimited cache at most, the last-token rule aside."""
    hit_blocks: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    """Blocks that lost their content to another request."""
    block_size: int = 0
    usable_blocks: int | None = None
    """Null: unlimited."""
    compared: int = 0
    """Requests whose cached tokens the trace reports, of SGLang and llama.cpp."""
    as_reported: int = 0
    """Of these, requests with as many here, to the trace's block."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def size(self) -> str:
        return size_text(self.usable_blocks, self.block_size)

    def count_tokens(self, record: Record, hit_tokens: int) -> None:
        """Add one request, whose hits may end inside a block."""
        tokens = record.prompt_tokens or 0
        self.input_tokens += tokens
        self.lookup_blocks += tokens // self.block_size
        self.hit_blocks += hit_tokens // self.block_size
        self.hit_tokens += hit_tokens
        if record.cached_tokens is not None:
            self.compared += 1
            self.as_reported += record.cached_tokens // self.block_size == hit_tokens // self.block_size


@dataclass(slots=True, kw_only=True)
class RadixCounts(HitCounts):
    """Hits of SGLang's radix cache. Blocks are the trace's, or pages where these are larger."""

    evicted_tokens: int = 0
    evicted_nodes: int = 0
    """Evictions: a node goes whole."""
    kv_tokens: int | None = None
    """Tokens that the pool has room for; null: unlimited."""
    page_size: int = 1

    @property
    def size(self) -> str:
        return "unlimited" if self.kv_tokens is None else f"{self.kv_tokens:,} tokens in pages of {self.page_size}"


@dataclass(slots=True, kw_only=True)
class SlotCounts(HitCounts):
    """Hits of llama.cpp's slots and prompt cache."""

    evicted_tokens: int = 0
    settings: SlotConfig

    @property
    def size(self) -> str:
        kept = self.settings.cache_ram_tokens
        beside = "no bound" if kept is None else f"{kept:,} tokens"
        return f"{self.settings.slots} slots, prompt cache: {beside}"


OWN_FLAGS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("kv_groups", "bound"),
    "sglang": ("kv_tokens", "page_size", "chunked_prefill_size"),
    "llamacpp": tuple(SlotConfig.__dataclass_fields__),
}
"""Flags of one engine alone."""


def run(arguments: argparse.Namespace) -> int:
    refuse_other_engines(arguments)
    if arguments.kv_groups is not None:
        return hybrid.run(arguments, parse_usable_blocks(arguments.num_gpu_blocks))
    counts = count_trace_hits(arguments)
    print(json.dumps({**asdict(counts), "hit_rate": counts.hit_rate}) if arguments.json else describe(counts))
    return 0


def count_trace_hits(arguments: argparse.Namespace) -> HitCounts:
    """Run the whole trace through the cache that the flags name."""
    usable_blocks, block_size = parse_usable_blocks(arguments.num_gpu_blocks), parse_block_size(arguments.block_size)
    refuse_other_engines(arguments)
    with open_trace(arguments.trace) as reader:
        refuse_other_attention(reader.meta, arguments.trace)
        if arguments.engine == "sglang":
            radix = radix_config(arguments)
            meta, records = finest_records(reader, radix.page_size)
            return count_radix_hits(records, page_chains(meta, radix.page_size, block_size), radix, usable_blocks)
        if arguments.engine == "llamacpp":
            meta, records = finest_records(reader, 1)
            return count_slot_hits(records, Chains(meta, block_size), slot_config(arguments, meta.engine))
        chains = engine_chains(reader.meta, block_size)
        return count_pool_hits(reader, chains, usable_blocks, belady=arguments.bound)


def refuse_other_engines(arguments: argparse.Namespace) -> None:
    """Raise InputError for a flag that only another engine has."""
    for engine, names in OWN_FLAGS.items():
        given = given_flags(arguments, names)
        if given and engine != arguments.engine:
            raise InputError(
                f"{', '.join(given)}: only with --engine {engine}; expected without --engine {arguments.engine}"
            )
    if arguments.engine == "llamacpp" and arguments.num_gpu_blocks != "inf":
        raise InputError("--num-gpu-blocks: llama.cpp has no pool of blocks; expected --slots and --cache-ram-tokens")


def count_pool_hits(
    reader: TraceReader, chains: Chains, usable_blocks: int | None, *, belady: bool = False
) -> HitCounts:
    """Hits in vLLM's pool: rules 1 to 11 of docs/simulator.md, with one request at a time; ``belady``: the bound."""
    prompts = read_prompts(in_file_order(hashed_batches(reader)), chains)
    fitting = prompts.take(prompts.fit(usable_blocks))
    if belady:
        pool = BeladyPool(fitting, usable_blocks)
        hit_blocks, evicted_blocks = int(pool.run().sum()), pool.evicted_blocks
    else:
        cache = single_group_cache(chains.block_size, usable_blocks)
        hit_blocks = sum(cache.serve_alone(request) for request in fitting.requests()) // chains.block_size
        evicted_blocks = int(cache.evicted_blocks())
    return HitCounts(
        block_size=chains.block_size,
        usable_blocks=usable_blocks,
        requests=len(prompts),
        rejected=len(prompts) - len(fitting),
        input_tokens=int(fitting.prompt_tokens.sum()),
        lookup_blocks=int((fitting.prompt_tokens // chains.block_size).sum()),
        hit_blocks=hit_blocks,
        hit_tokens=hit_blocks * chains.block_size,
        evicted_blocks=evicted_blocks,
    )


def page_chains(meta: Meta, page_size: int, block_size: int | None) -> Chains:
    """Chains at the larger of block and page size. Raises InputError unless one divides the other."""
    known = block_size or meta.block_size
    if known is not None and page_size % known and known % page_size:
        raise InputError(
            f"--page-size: {page_size} neither divides blocks of {known} tokens nor is a multiple of them; "
            f"expected 1, {known} or {2 * known}, for example"
        )
    return Chains(meta, max(page_size, known) if known else None)


def count_radix_hits(
    records: Iterable[Record], chains: Chains, config: RadixConfig, blocks: int | None = None
) -> RadixCounts:
    """Hits in SGLang's pool of ``config``, or of so many ``blocks``, one request at a time."""
    size = chains.block_size
    if config.max_total_num_tokens is None and blocks is not None:
        config = replace(config, max_total_num_tokens=blocks * size)
    room = config.max_total_num_tokens
    pool = RadixPool(config, size)
    counts = RadixCounts(
        block_size=size,
        usable_blocks=None if room is None else room // size,
        kv_tokens=room,
        page_size=config.page_size,
    )
    for record in records:
        counts.requests += 1
        prompt, computed = record.prompt_tokens or 0, tokens_computed(record)
        if not pool.fits(prompt, record.output_tokens or 0):
            counts.rejected += 1
            continue
        scored = bool(record.prompt_logprobs)
        found = pool.run(chains.begun(record), prompt, computed, prompt_logprobs=scored)
        counts.count_tokens(record, found)
    counts.evicted_nodes = pool.tree.evicted_nodes
    counts.evicted_tokens = pool.tree.evicted_tokens
    counts.evicted_blocks = counts.evicted_tokens // size
    return counts


def count_slot_hits(records: Iterable[Record], chains: Chains, config: SlotConfig) -> SlotCounts:
    """Hits in llama.cpp's slots, requests at their times; one that finds all slots busy starts at the next release."""
    counts = SlotCounts(block_size=chains.block_size, settings=config)
    cache = SlotCache(config, chains.block_size)
    running: list[tuple[float, int, Slot, Chain]] = []
    for number, record in enumerate(sorted(records, key=lambda record: record.arrival_ms or 0.0)):
        arrival_ms, prompt = record.arrival_ms or 0.0, record.prompt_tokens or 0
        whole = Chain(chains.begun(record), tokens_computed(record))
        asked = Chain(whole.keys[: -(-prompt // chains.block_size)], prompt)
        while running and running[0][0] <= arrival_ms:
            cache.end(*heapq.heappop(running)[2:])
        while (started := cache.start(asked)) is None:
            cache.end(*heapq.heappop(running)[2:])
        slot, hits = started
        heapq.heappush(running, (arrival_ms + (record.e2e_ms or 0.0), number, slot, whole))
        counts.requests += 1
        counts.count_tokens(record, hits)
    counts.evicted_tokens = cache.evicted_tokens
    counts.evicted_blocks = counts.evicted_tokens // chains.block_size
    return counts


def parse_usable_blocks(text: str) -> int | None:
    """Usable blocks of ``--num-gpu-blocks``: one fewer than the number, or None for ``inf``. Raises InputError."""
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
    """Return the tokens in a block, and of what it is made if that is not the trace's own."""
    made = "" if block_size == fine_block_size else f" ({block_size // fine_block_size} of the trace's)"
    return f"{block_size} tokens{made}"


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
        lines.append(f"cached as reported: {counts.as_reported:,} of {counts.compared:,} requests, to {unit}")
    if counts.rejected:
        lines.append(f"{counts.rejected:,} requests do not fit the pool and were left out")
    return "\n".join(lines)
