"""``sim curve``: a trace's prefix hits at every cache size, in one pass.

The policy is the stack algorithm nearest to vLLM's pool: LRU over full prompt blocks. A request's hits are counted at
its arrival, over its leading blocks and short of its last token (rule 6); then its blocks are touched leaf to root, so
that tails go first. Decode blocks, blocks pinned by running requests and time are left out, so the pool itself
(``sim pool``) hits a little more or less.

LRU keeps, at every size S, the S blocks touched last (Mattson et al., 1970). So a block's depth in that order at its
request's arrival says at once from which size on it hits, and one histogram of depths is the whole curve. A leading
block hits only if those before it do: what counts is the running maximum of the depths.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from measure.stackdepth import access_depths, count_depths, resident_owners
from sim.cache.pool import add_trace_flags, parse_block_size
from sim.cache.sampledcurve import Sampling, describe_sampled, sample_curve, sampled_as_json
from sim.workload.accesses import Accesses, read_block_sizes
from sim.workload.chain import Chains, hashed_records
from sim.workload.groups import Grouping, add_group_arguments, grouping_of
from tracefile.files.reading import open_trace
from tracefile.records.arrays import FloatArray, IntArray
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
    block_size: int
    lookup_blocks: int
    """Full prompt blocks of the whole trace."""
    input_tokens: int

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """Use of a cache of one size by one group."""

    name: str
    requests: int
    input_tokens: int
    lookup_blocks: int
    hit_blocks: int
    hit_rate: float
    hit_share: float
    """Of all groups' hits."""
    inserted_blocks: int
    inserted_share: float
    held_share: float
    """Of the blocks that the cache holds, averaged over requests; a block belongs to the group that touched it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """All groups in a cache of one size."""

    blocks: int
    tokens: int
    groups: list[GroupUse]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument(
        "--block-sizes", metavar="B,B…", help="a curve for each of several block sizes, from one reading"
    )
    parser.add_argument("--cache-tokens", metavar="N,N…", help="show these cache sizes, in tokens")
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
    grouping = grouping_of(arguments)
    if arguments.sample is not None:
        return _run_sampled(arguments, block_sizes, cache_tokens)
    found = []
    for accesses in read_block_sizes(arguments.trace, block_sizes, grouping):
        curve = hit_curve(accesses)
        found.append((curve, use_at(accesses, curve, grouping, cache_tokens)))
    curves = [curve_as_json(curve, uses) for curve, uses in found] if arguments.json else []
    return _print(arguments, curves, [describe(curve, cache_tokens, uses) for curve, uses in found])


def _run_sampled(arguments: argparse.Namespace, block_sizes: list[int | None], cache_tokens: list[int]) -> int:
    if arguments.by is not None:
        raise InputError("--by: given with --sample; expected one of them: groups need the whole trace")
    sampling = Sampling(rate=arguments.sample, exact_blocks=arguments.exact_blocks, seed=arguments.sample_seed)
    curves, texts = [], []
    for block_size in block_sizes:
        with open_trace(arguments.trace) as reader:
            chains = Chains(reader.meta, block_size)
            shown = [size for size in (tokens // chains.block_size for tokens in cache_tokens) if size]
            curve = sample_curve(hashed_records(reader), chains, sampling, shown)
        curves.append(sampled_as_json(curve))
        texts.append(describe_sampled(curve, shown))
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
    depths = count_depths(accesses.blocks, accesses.starts, accesses.limits, accesses.distinct)
    hit_blocks = np.cumsum(depths)[1:]
    # From the last depth that occurs on, nothing changes any more.
    hit_blocks = hit_blocks[: int(np.searchsorted(hit_blocks, hit_blocks[-1])) + 1] if depths.any() else hit_blocks[:0]
    return HitCurve(
        np.arange(1, len(hit_blocks) + 1, dtype=np.int64),
        hit_blocks,
        accesses.block_size,
        len(accesses.blocks),
        accesses.input_tokens,
    )


def use_at(accesses: Accesses, curve: HitCurve, grouping: Grouping | None, cache_tokens: list[int]) -> list[CacheUse]:
    """Use of caches of ``cache_tokens`` by group, or else of caches with certain shares of the max hits."""
    if grouping is None or not curve.max_hit_blocks:
        return []
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    sizes = sizes or sorted({curve.size_for_share(share) for share in GROUPED_SHARES})
    return cache_use(accesses, grouping, [size for size in sizes if size])


def cache_use(accesses: Accesses, grouping: Grouping, sizes: list[int]) -> list[CacheUse]:
    if accesses.groups is None or not len(accesses.limits):
        return []
    names, place = accesses.groups.largest(accesses.prompt_tokens, grouping.most)
    needs = needed_sizes(accesses)
    owner = place[accesses.request_of]
    uses = []
    for size in sizes:
        hit = needs <= min(size, accesses.distinct)
        uses.append(_use(accesses, names, place, np.bincount(owner[hit], minlength=len(names)), size))
    return uses


def needed_sizes(accesses: Accesses) -> IntArray:
    """The smallest cache in which each access hits; more than there are blocks: it hits in none."""
    depths, _ = access_depths(accesses.blocks, accesses.starts, accesses.distinct)
    never = accesses.distinct + 1
    depths[(depths == 0) | ~accesses.may_hit] = never
    # One running maximum over all: a request's values lie above all values of the request before it.
    base = accesses.request_of * (never + 1)
    return np.asarray(np.maximum.accumulate(base + depths) - base)


def _use(accesses: Accesses, names: list[str], place: IntArray, hits: IntArray, size: int) -> CacheUse:
    count = len(names)
    inserted, held = resident_owners(accesses.blocks, accesses.starts, place, count, size)
    tokens = np.bincount(place, accesses.prompt_tokens, count)
    lookups = np.bincount(place, np.diff(accesses.starts), count)
    requests = np.bincount(place, minlength=count)
    rates = _shares(hits * accesses.block_size, tokens)
    columns = zip(
        names,
        requests.tolist(),
        tokens.astype(int).tolist(),
        lookups.astype(int).tolist(),
        hits.tolist(),
        rates.tolist(),
        _shares(hits, hits.sum()).tolist(),
        inserted.tolist(),
        _shares(inserted, inserted.sum()).tolist(),
        _shares(held, held.sum()).tolist(),
        strict=True,
    )
    fields = GroupUse.__slots__
    groups = [GroupUse(**dict(zip(fields, row, strict=True))) for row in columns]
    return CacheUse(blocks=size, tokens=size * accesses.block_size, groups=groups)


def _shares(parts: IntArray, whole: object) -> FloatArray:
    return np.asarray(parts / np.maximum(np.asarray(whole, float), 1.0))


def curve_as_json(curve: HitCurve, uses: list[CacheUse]) -> dict[str, Any]:
    return {
        "block_size": curve.block_size,
        "lookup_blocks": curve.lookup_blocks,
        "input_tokens": curve.input_tokens,
        "sizes": curve.sizes.tolist(),
        "hit_blocks": curve.hit_blocks.tolist(),
        "hit_tokens": curve.hit_tokens.tolist(),
        "use": [asdict(use) for use in uses],
    }


def describe(curve: HitCurve, cache_tokens: list[int], uses: list[CacheUse]) -> str:
    most = curve.max_hit_blocks
    lines = [
        f"max hits (unlimited cache): {most:,} of {curve.lookup_blocks:,} full prompt blocks of {curve.block_size} "
        f"tokens, {curve.rate_at(len(curve.sizes)):.2%} of input tokens"
    ]
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    shares = [curve.hits_at(size) / most if most else 0.0 for size in sizes]
    if not cache_tokens and most:
        shares, sizes = [*SHARES], [curve.size_for_share(share) for share in SHARES]
    if sizes:
        lines.append(
            f"{'% of max hits':>14} {'hit blocks':>12} {'% of input':>11} {'usable blocks':>14} {'cache tokens':>15}"
        )
    for share, size in zip(shares, sizes, strict=True):
        hits, tokens = curve.hits_at(size), size * curve.block_size
        lines.append(f"{share:>14.0%} {hits:>12,} {curve.rate_at(size):>11.2%} {size:>14,} {tokens:>15,}")
    for use in uses:
        lines += _describe_use(use)
    return "\n".join(lines)


def _describe_use(use: CacheUse) -> list[str]:
    lines = [
        "",
        f"{use.blocks:,} usable blocks ({use.tokens:,} tokens)",
        f"{'group':>24} {'requests':>9} {'hit rate':>9} {'of hits':>8} {'of inserted':>12} {'of held':>8}",
    ]
    for group in use.groups:
        name = group.name if len(group.name) <= 24 else group.name[:23] + "…"
        lines.append(
            f"{name:>24} {group.requests:>9,} {group.hit_rate:>9.2%} {group.hit_share:>8.2%} "
            f"{group.inserted_share:>12.2%} {group.held_share:>8.2%}"
        )
    return lines
