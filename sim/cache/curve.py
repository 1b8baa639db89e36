"""``sim curve``: a trace's prefix hits at every cache size, in one pass.

The policy is the stack algorithm nearest to vLLM's pool: LRU over full blocks. Hits of a request are counted at its
arrival: leading blocks of its prompt, short of its last token (rule 6). Then its blocks are touched leaf to root,
so that tails go first: those of its output, as far as their hashes are known, before those of its prompt. Blocks
pinned by running requests and time are left out.

**The bound.** An engine that admits requests in order of arrival has, at an admission, computed nothing but blocks of
earlier arrivals. So it never hits more than the unlimited cache. At a finite size LRU by arrival is no bound: a long
request's blocks are freed at its end, and may outlive those of a request that arrived later and was short.

LRU keeps, at every size S, the S blocks touched last (Mattson et al., 1970). So a block's depth in that order at its
request's arrival says from which size on it hits. One histogram of depths is the whole curve. A leading
block hits only if those before it do: what counts is the running maximum of the depths.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.modelconfig import kv_bytes_per_token
from measure.cacheuse import CacheUse
from measure.stackdepth import count_depths
from measure.table import table_lines
from sim.cache.groupuse import cache_use, describe_groups
from sim.cache.pool import add_trace_flags, block_size_text, gib_cell, gib_heading, parse_block_size, unknown_outputs
from sim.cache.sampledcurve import Sampling, describe_sampled, sample_curve, sampled_as_json
from sim.workload.accesses import Accesses, read_block_sizes
from sim.workload.chain import engine_chains, hashed_records
from sim.workload.groups import Grouping, add_group_arguments, grouping_of
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError

SHARES = (0.50, 0.80, 0.90, 0.95, 0.99, 1.00)
GROUPED_SHARES = (0.50, 0.90, 1.00)
"""Where ``--by`` looks unless it is told."""


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits at every cache size from one block to where no more memory helps. Arrays of one length."""

    sizes: IntArray
    """Cache sizes in blocks: 1, 2, 3 …"""
    hit_blocks: IntArray
    """Prompt blocks hit at each size; never falls."""
    bound_blocks: IntArray
    """Blocks that no engine of each size can exceed: of every request its unlimited hits, at most the size."""
    block_size: int
    lookup_blocks: int
    """Full prompt blocks of the whole trace."""
    input_tokens: int
    fine_block_size: int
    """The trace's, which ``block_size`` is a multiple of."""
    requests: int
    whole_chains: int
    """Requests whose filled blocks are all known. With fewer than all, an engine may hit more than the maximum."""

    @property
    def hit_tokens(self) -> IntArray:
        return self.hit_blocks * self.block_size

    @property
    def max_hit_blocks(self) -> int:
        return int(self.hit_blocks[-1]) if len(self.hit_blocks) else 0

    def hits_at(self, size: int) -> int:
        if size < 1 or not len(self.sizes):
            return 0
        return int(self.hit_blocks[min(size, len(self.sizes)) - 1])

    def size_for(self, hits: int) -> int:
        return int(self.sizes[np.searchsorted(self.hit_blocks, hits)])

    def size_for_share(self, share: float) -> int:
        """Smallest cache, in blocks, with this share of the max hits."""
        return self.size_for(-int(-self.max_hit_blocks * share // 1))

    def rate_at(self, size: int) -> float:
        return self.hits_at(size) * self.block_size / self.input_tokens if self.input_tokens else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument(
        "--block-sizes", metavar="B,B…", help="a curve for each of several block sizes, from one reading"
    )
    parser.add_argument("--cache-tokens", metavar="N,N…", help="show these cache sizes, in tokens")
    parser.add_argument(
        "--kv-bytes-per-token", type=int, metavar="N", help="show sizes in GiB: bytes of a token's KV in all layers"
    )
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="the same from a Hugging Face config.json or its folder"
    )
    add_group_arguments(parser)
    parser.add_argument(
        "--sample", type=float, metavar="R", help="estimate from this share of blocks, in little memory"
    )
    parser.add_argument(
        "--exact-blocks",
        type=int,
        default=1 << 16,
        metavar="N",
        help="with --sample: count sizes up to N blocks exactly (default 65536)",
    )
    parser.add_argument("--sample-seed", type=int, default=0, metavar="N", help="seed of the sample (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the whole curves")


def run(arguments: argparse.Namespace) -> int:
    block_sizes = parse_block_sizes(arguments.block_size, arguments.block_sizes)
    cache_tokens = parse_numbers(arguments.cache_tokens, "--cache-tokens")
    grouping, kv_bytes = grouping_of(arguments), _kv_bytes(arguments)
    if arguments.sample is not None:
        return _run_sampled(arguments, block_sizes, cache_tokens, kv_bytes)
    curves, texts = [], []
    for accesses in read_block_sizes(arguments.trace, block_sizes, grouping):
        curve = hit_curve(accesses)
        uses = use_at(accesses, curve, grouping, cache_tokens)
        curves += [{**curve_as_json(curve, uses), "kv_bytes_per_token": kv_bytes}] if arguments.json else []
        text = describe(curve, cache_tokens, uses, kv_bytes)
        texts.append("\n".join([text, *describe_groups(accesses.groups, uses)]))
    return _print(arguments, curves, texts)


def _kv_bytes(arguments: argparse.Namespace) -> int | None:
    """Bytes of a token's KV; None: not told. Raises InputError."""
    given: int | None = arguments.kv_bytes_per_token
    if given is not None and given < 1:
        raise InputError(f"--kv-bytes-per-token: {given}; expected a positive number of bytes")
    if given is not None and arguments.model_config is not None:
        raise InputError("--model-config: given with --kv-bytes-per-token; expected one of them")
    return given if arguments.model_config is None else kv_bytes_per_token(arguments.model_config)


def _run_sampled(
    arguments: argparse.Namespace, block_sizes: list[int | None], cache_tokens: list[int], kv_bytes: int | None
) -> int:
    if arguments.by is not None:
        raise InputError("--by: given with --sample; expected one of them: groups need the whole trace")
    sampling = Sampling(rate=arguments.sample, exact_blocks=arguments.exact_blocks, seed=arguments.sample_seed)
    curves, texts = [], []
    for block_size in block_sizes:
        with open_trace(arguments.trace) as reader:
            chains = engine_chains(reader.meta, block_size)
            shown = [size for size in (tokens // chains.block_size for tokens in cache_tokens) if size]
            curve = sample_curve(hashed_records(reader), chains, sampling, shown)
        curves.append({**sampled_as_json(curve), "kv_bytes_per_token": kv_bytes})
        texts.append(describe_sampled(curve, shown, kv_bytes))
    return _print(arguments, curves, texts)


def _print(arguments: argparse.Namespace, curves: list[dict[str, Any]], texts: list[str]) -> int:
    found = {"kind": "curve", "trace": str(arguments.trace), "curves": curves}
    print(json.dumps(found) if arguments.json else "\n\n".join(texts))
    return 0


def parse_block_sizes(one: int | None, several: str | None) -> list[int | None]:
    if several is None:
        return [parse_block_size(one)]
    if one is not None:
        raise InputError("--block-sizes: given with --block-size; expected one of them")
    return [*parse_numbers(several, "--block-sizes")]


def parse_numbers(text: str | None, flag: str) -> list[int]:
    """Positive numbers with commas between, each once, in order. Raises InputError."""
    try:
        numbers = sorted({int(part) for part in text.split(",")}) if text is not None else []
    except ValueError:
        numbers = [0]
    if numbers and numbers[0] < 1:
        raise InputError(f"{flag}: {text!r}; expected positive numbers with commas between")
    return numbers


def hit_curve(accesses: Accesses) -> HitCurve:
    depths, requests_by_hits = count_depths(accesses.blocks, accesses.starts, accesses.limits, accesses.distinct)
    hit_blocks = np.cumsum(depths)[1:]
    # From the last depth that occurs on, nothing changes any more.
    hit_blocks = hit_blocks[: int(np.searchsorted(hit_blocks, hit_blocks[-1])) + 1] if depths.any() else hit_blocks[:0]
    return HitCurve(
        np.arange(1, len(hit_blocks) + 1, dtype=np.int64),
        hit_blocks,
        _bound(requests_by_hits, len(hit_blocks)),
        accesses.block_size,
        int(accesses.lookup_blocks.sum()),
        accesses.input_tokens,
        accesses.fine_block_size or accesses.block_size,
        len(accesses.limits),
        accesses.whole_chains,
    )


def _bound(requests_by_hits: IntArray, sizes: int) -> IntArray:
    """Σ min(hits, size) over requests, at each size from 1 on: so many blocks hold no more of one prompt."""
    with_as_many = np.zeros(sizes, np.int64)
    found = np.cumsum(requests_by_hits[::-1])[::-1][1 : sizes + 1]
    with_as_many[: len(found)] = found
    return np.cumsum(with_as_many)


def use_at(accesses: Accesses, curve: HitCurve, grouping: Grouping | None, cache_tokens: list[int]) -> list[CacheUse]:
    """Use of caches of ``cache_tokens`` by group, or else of caches with certain shares of the max hits."""
    if grouping is None or not curve.max_hit_blocks:
        return []
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    sizes = sizes or sorted({curve.size_for_share(share) for share in GROUPED_SHARES})
    return cache_use(accesses, grouping, [size for size in sizes if size])


def curve_as_json(curve: HitCurve, uses: list[CacheUse]) -> dict[str, Any]:
    return {
        "block_size": curve.block_size,
        "lookup_blocks": curve.lookup_blocks,
        "input_tokens": curve.input_tokens,
        "requests": curve.requests,
        "whole_chains": curve.whole_chains,
        "sizes": curve.sizes.tolist(),
        "hit_blocks": curve.hit_blocks.tolist(),
        "bound_blocks": curve.bound_blocks.tolist(),
        "hit_tokens": curve.hit_tokens.tolist(),
        "use": [asdict(use) for use in uses],
    }


def describe(curve: HitCurve, cache_tokens: list[int], uses: list[CacheUse], kv_bytes: int | None = None) -> str:
    most = curve.max_hit_blocks
    blocks, whole = block_size_text(curve.block_size, curve.fine_block_size), curve.rate_at(len(curve.sizes))
    lines = [
        f"max hits (unlimited cache): {most:,} of {curve.lookup_blocks:,} full prompt blocks of {blocks}, "
        f"{whole:.2%} of input tokens"
    ]
    lines += unknown_outputs(curve.requests, curve.whole_chains)
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    shares = [curve.hits_at(size) / most if most else 0.0 for size in sizes]
    if not cache_tokens and most:
        shares, sizes = [*SHARES], [curve.size_for_share(share) for share in SHARES]
    rows = []
    for share, size in zip(shares, sizes, strict=True):
        hits, tokens = curve.hits_at(size), size * curve.block_size
        cells = [f"{share:.0%}", f"{hits:,}", f"{curve.rate_at(size):.2%}", f"{size:,}", f"{tokens:,}"]
        rows.append(cells + gib_cell(tokens, kv_bytes))
    headings = ["% of max hits", "hit blocks", "% of input", "usable blocks", "cache tokens", *gib_heading(kv_bytes)]
    lines += table_lines(headings, rows) if rows else []
    return "\n".join(lines)
