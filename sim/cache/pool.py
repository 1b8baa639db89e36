"""``sim pool``: a trace's prefix hits in a block pool of one size, requests one at a time in file order.

No time passes and nothing runs at once, so this is what the cache itself is worth to the traffic: each request looks
its prompt up, takes the blocks it lacks, fills them to its last token, and frees them before the next one comes.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from sim.sglang.radixconfig import RadixConfig, add_radix_flags, radix_config
from sim.vllm.config import FreeRule
from sim.vllm.pool import BlockPool
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import Chains, hashed_records, is_private, tokens_computed
from tracefile.files.reading import open_trace
from tracefile.importers.mooncake import PARTIAL_BLOCK
from tracefile.records.errors import InputError
from tracefile.records.schema import Record

COMPILED_FROM_BYTES = 64 << 20
"""Size of a trace file from which loading compiled code takes less time than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What ``sim pool`` was asked."""

    trace: Path
    blocks: int | None
    """Usable blocks: vLLM's num_gpu_blocks less the null block. None: endless."""
    free_rule: FreeRule = "vllm"
    block_size: int | None = None
    """None: the trace's own."""
    object_lru: bool = False
    """A plain LRU of single blocks instead of the pool."""
    radix: RadixConfig | None = None
    """SGLang's radix cache instead of vLLM's pool; ``blocks`` and ``free_rule`` do not count then."""


@dataclass(slots=True, kw_only=True)
class HitCounts:
    """What the cache was worth. Rates are of input tokens; all counts are over ``requests`` less ``rejected``."""

    requests: int = 0
    """Records with a prompt length."""
    rejected: int = 0
    """Those of them that alone do not fit the pool: vLLM could never run them, so they touch nothing."""
    input_tokens: int = 0
    lookup_blocks: int = 0
    """Full prompt blocks: what an endless cache could at most have hit, the last-token rule aside."""
    hit_blocks: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    """Blocks that lost their content to another request."""
    block_size: int = 0
    blocks: int | None = None
    """Usable blocks; null: endless."""

    @property
    def hit_rate(self) -> float:
        """Hit tokens over input tokens; 0 of nothing is 0."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def size(self) -> str:
        """The cache's size in words."""
        return "endless" if self.blocks is None else f"{self.blocks:,} blocks of {self.block_size} tokens"

    def count(self, record: Record, hit_blocks: int) -> None:
        """Add one request that was run."""
        self.count_tokens(record, hit_blocks * self.block_size)

    def count_tokens(self, record: Record, hit_tokens: int) -> None:
        """Add one request whose hits may end inside a block."""
        tokens = record.prompt_tokens or 0
        self.input_tokens += tokens
        self.lookup_blocks += tokens // self.block_size
        self.hit_blocks += hit_tokens // self.block_size
        self.hit_tokens += hit_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``sim pool``."""
    parser.add_argument("trace", type=Path, help="a kvtape, Mooncake, Bailian or vllm-vcr trace with block hashes")
    parser.add_argument(
        "--blocks", default="inf", metavar="N", help="usable blocks (num_gpu_blocks less one), or inf (default)"
    )
    parser.add_argument(
        "--free-rule",
        "--vllm-free-rule",
        choices=get_args(FreeRule),
        default="vllm",
        help="where freed blocks without a hash go: the queue's head (vllm) or its tail (append_all, older vLLM)",
    )
    parser.add_argument("--block-size", type=int, metavar="B", help="tokens in a block, a multiple of the trace's")
    parser.add_argument(
        "--object-lru", action="store_true", help="a plain LRU of single blocks, as a yardstick, instead of the pool"
    )
    add_radix_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Count the hits and print them."""
    config = PoolConfig(
        trace=arguments.trace,
        blocks=parse_blocks(arguments.blocks),
        free_rule=arguments.free_rule,
        block_size=parse_block_size(arguments.block_size),
        object_lru=arguments.object_lru,
        radix=radix_config(arguments),
    )
    counts = count_trace_hits(config)
    if arguments.json:
        print(json.dumps({**asdict(counts), "hit_rate": counts.hit_rate}))
    else:
        print(describe(counts))
    return 0


def count_trace_hits(config: PoolConfig) -> HitCounts:
    """Run the whole trace through the cache that ``config`` names. Streams: memory is the pool's, not the trace's."""
    with open_trace(config.trace) as reader:
        refuse_other_attention(reader.meta, config.trace)
        records = hashed_records(reader)
        if config.radix is not None:
            from sim.cache.radixpool import count_radix_hits, page_chains  # noqa: PLC0415 - it counts in what is above

            radix_chains = page_chains(reader.meta, config.radix.page_size, config.block_size)
            return count_radix_hits(records, radix_chains, config.radix, config.blocks)
        chains = Chains(reader.meta, config.block_size)
        if config.object_lru:
            return count_object_hits(records, chains, config.blocks)
        if config.trace.stat().st_size >= COMPILED_FROM_BYTES:
            return count_segment_hits(records, chains, config.blocks, config.free_rule)
        if config.blocks is None:
            return count_endless_hits(records, chains)
        return count_pool_hits(records, chains, BlockPool(config.blocks + 1, chains.block_size, config.free_rule))


def count_pool_hits(records: Iterable[Record], chains: Chains, pool: BlockPool) -> HitCounts:
    """Hits in vLLM's pool: rules 1 to 11 of docs/simulator.md, with one request at a time."""
    usable, block_size = pool.num_free, pool.block_size
    counts = HitCounts(block_size=block_size, blocks=usable)
    for record in records:
        counts.requests += 1
        held = -(-tokens_computed(record) // block_size)
        if held > usable:
            counts.rejected += 1
            continue
        keys = chains.whole(record)
        hits = pool.lookup(keys, _lookup_limit(record, block_size))
        pool.hold(hits)
        blocks = hits + pool.take(held - len(hits))
        pool.insert(blocks[len(hits) : len(keys)], keys[len(hits) :])
        pool.release(blocks)
        counts.count(record, len(hits))
    counts.evicted_blocks = pool.evicted_blocks
    return counts


def count_segment_hits(
    records: Iterable[Record], chains: Chains, usable: int | None, free_rule: FreeRule = "vllm"
) -> HitCounts:
    """The same hits, compiled, at the cost of the chains' branches rather than of their blocks; None: endless."""
    from sim.cache.segmentpool import SegmentPool, lay_out  # noqa: PLC0415 - it takes as long to load as a small trace takes

    pool = SegmentPool(usable, free_rule)
    counts = HitCounts(block_size=chains.block_size, blocks=usable)
    for prompt_tokens, _, keys, requests in lay_out(records, chains):
        fits = requests["held"] <= (usable or requests["held"])
        hits = pool.run(keys, requests[fits])
        counts.requests += len(requests)
        counts.rejected += len(requests) - len(hits)
        counts.input_tokens += int(prompt_tokens[fits].sum())
        counts.lookup_blocks += int((prompt_tokens[fits] // chains.block_size).sum())
        counts.hit_blocks += int(hits.sum())
    counts.hit_tokens = counts.hit_blocks * chains.block_size
    counts.evicted_blocks = pool.evicted_blocks
    return counts


def count_endless_hits(records: Iterable[Record], chains: Chains) -> HitCounts:
    """Hits in a cache that forgets nothing: every key seen is there."""
    counts = HitCounts(block_size=chains.block_size)
    seen: set[int] = set()
    for record in records:
        counts.requests += 1
        keys = chains.whole(record)
        counts.count(record, _leading(keys[: _lookup_limit(record, chains.block_size)], seen))
        seen.update(key for key in keys if not is_private(key))
    return counts


def count_object_hits(records: Iterable[Record], chains: Chains, capacity: int | None) -> HitCounts:
    """Hits of a plain LRU that knows no prefixes and no outputs: the prompt's blocks as single objects, in order.

    A started last block is an object too, as studies of published traces count: under its published id where the trace
    keeps it, else one of its own.
    """
    counts = HitCounts(block_size=chains.block_size, blocks=capacity)
    objects = ObjectLru(capacity)
    for record in records:
        counts.requests += 1
        keys = chains.prompt(record)
        if (record.prompt_tokens or 0) % chains.block_size:
            published = record.extra.get(PARTIAL_BLOCK) if chains.as_recorded else None
            keys += chains.private(1) if published is None else [published]
        counts.count(record, objects.access(keys))
    counts.evicted_blocks = objects.evicted
    return counts


class ObjectLru:
    """Least recently used keys, at most ``capacity`` of them; None: no limit."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.evicted = 0
        self._keys: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def access(self, keys: Sequence[int]) -> int:
        """Touch ``keys`` in order; how many were there."""
        hits = 0
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)
                hits += 1
                continue
            if self.capacity is not None and len(self._keys) >= self.capacity:
                self._keys.popitem(last=False)
                self.evicted += 1
            self._keys[key] = None
        return hits


def parse_blocks(text: str) -> int | None:
    """``--blocks``: a positive integer, or ``inf`` for None. Raises InputError."""
    if text.lower() in {"inf", "infinite", "unlimited"}:
        return None
    try:
        blocks = int(text)
    except ValueError:
        blocks = 0
    if blocks < 1:
        raise InputError(f"--blocks: {text!r}; expected a positive number of blocks or inf")
    return blocks


def parse_block_size(block_size: int | None) -> int | None:
    """``--block-size``: positive, or absent. Raises InputError."""
    if block_size is not None and block_size < 1:
        raise InputError(f"--block-size: {block_size}; expected a positive number of tokens")
    return block_size


def describe(counts: HitCounts) -> str:
    """The counts as a few lines for a terminal."""
    lines = [
        f"{counts.size}: {counts.hit_tokens:,} of {counts.input_tokens:,} input tokens hit ({counts.hit_rate:.2%})",
        f"{counts.hit_blocks:,} of {counts.lookup_blocks:,} full prompt blocks, {counts.evicted_blocks:,} evicted, "
        f"{counts.requests:,} requests",
    ]
    if counts.rejected:
        lines.append(f"{counts.rejected:,} requests do not fit the pool and were left out")
    return "\n".join(lines)


def _lookup_limit(record: Record, block_size: int) -> int:
    """Rule 6: a prompt's last token is always computed, so a prompt that is all full blocks cannot hit its last."""
    return ((record.prompt_tokens or 1) - 1) // block_size


def _leading(keys: Sequence[int], seen: set[int]) -> int:
    for position, key in enumerate(keys):
        if key not in seen:
            return position
    return len(keys)
