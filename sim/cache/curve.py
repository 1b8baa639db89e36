"""``sim curve``: a trace's prefix hits at every cache size, in one pass, and the use of one size by groups."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.modelconfig import kv_bytes_per_token
from measure.metrics.flags import add_kv_bytes_argument, checked_kv_bytes
from measure.table import table_lines
from measure.wording import factor
from report.output import add_page_argument, page_path, write_page
from sim.cache.pool import add_trace_flags, block_size_text, parse_block_size
from sim.cache.results import CacheUse, GroupUse
from sim.vllm.config import add_kv_groups
from sim.workload.groups import Grouping, Groups, add_group_arguments, grouping_of, short_names
from tracefile.commandline.durations import duration
from tracefile.records.arrays import FloatArray, Int32Array, IntArray
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule, late_modules
from tracefile.sessions import NO_CHAINS

if TYPE_CHECKING:
    import numpy as np

    from measure.cache import accesses as accesses_of
    from measure.cache import hitcurve, stackdepth
    from measure.cache.accesses import Accesses
    from measure.cache.hitcurve import HitCurve
    from sim.cache import hybrid, pages
    from sim.cache import reuse as reusing
    from sim.workload import accesses as workload_accesses
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    accesses_of, hitcurve, stackdepth = late_modules("measure.cache", "accesses hitcurve stackdepth")
    hybrid, pages, reusing = late_modules("sim.cache", "hybrid pages reuse")
    workload_accesses = LateModule("sim.workload.accesses")


SHARES = (0.50, 0.80, 0.90, 0.95, 0.99, 1.00)
GROUPED_SHARES = (0.50, 0.90, 1.00)
"""Where ``--by`` looks unless it is told."""
MOST_NUMBER = 1 << 53
GIB = 2**30


EPILOG = """\
examples:
  sim curve monday.jsonl.zst --cache-tokens 100000,400000
  sim curve monday.jsonl.zst --window 60s --json > curve.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument(
        "--cache-tokens", metavar="N,N…", help="show these cache sizes, in tokens, such as 100000,200000"
    )
    add_kv_bytes_argument(parser)
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="the same from a Hugging Face config.json or its folder"
    )
    add_group_arguments(parser)
    add_kv_groups(parser)
    parser.add_argument(
        "--window", type=duration, help="tables of reuse, too: times between uses, blocks used per window, such as 60s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the complete curve")
    add_page_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.kv_groups is not None:
        return hybrid.run(arguments, "curve", None)
    if arguments.window == 0.0:
        raise InputError("--window: 0; expected a positive duration, such as 60s")
    block_size, cache_tokens = parse_block_size(arguments.block_size), parse_numbers(arguments.cache_tokens)
    grouping, kv_bytes = grouping_of(arguments), _kv_bytes(arguments)
    needs_times = arguments.window is not None
    accesses, groups = workload_accesses.read_grouped_accesses(
        arguments.trace, block_size, grouping, needs_times=needs_times
    )
    curve = hitcurve.hit_curve(accesses)
    uses = use_at(accesses, groups, curve, grouping, cache_tokens)
    reuse = reusing.measure_reuse(accesses, 1e3 * arguments.window) if needs_times else None
    html = page_path(arguments, [arguments.trace])
    if html is not None:
        write_page(html, pages.curve_page(str(arguments.trace), curve, uses, kv_bytes, reuse))
    if arguments.json:
        told = {**curve_as_json(curve, uses), "kv_bytes_per_token": kv_bytes}
        result = {"kind": "curve", "trace": str(arguments.trace), "curves": [told]}
        print(json.dumps({**result, "reuse": None if reuse is None else asdict(reuse)}))
        return 0
    lines = [describe(curve, cache_tokens, kv_bytes), *describe_groups(groups, uses)]
    print("\n".join([*lines, *([] if reuse is None else reusing.describe_reuse(reuse))]))
    return 0


def _kv_bytes(arguments: argparse.Namespace) -> int | None:
    """Bytes of a token's KV; None: not told. Raises InputError."""
    given = checked_kv_bytes(arguments.kv_bytes_per_token)
    if given is not None and arguments.model_config is not None:
        raise InputError("--model-config: given with --kv-bytes-per-token; expected one of them")
    return given if arguments.model_config is None else kv_bytes_per_token(arguments.model_config)


def parse_numbers(text: str | None) -> list[int]:
    """Read ``--cache-tokens``: positive numbers, each once, in order. Raises InputError."""
    try:
        numbers = sorted({int(part) for part in text.split(",")}) if text is not None else []
    except ValueError:
        numbers = [0]
    if numbers and not 1 <= numbers[0] <= numbers[-1] <= MOST_NUMBER:
        raise InputError(f"--cache-tokens: {text!r}; expected numbers from 1 to {MOST_NUMBER} with commas between")
    return numbers


def use_at(
    accesses: "Accesses",
    groups: Groups | None,
    curve: "HitCurve",
    grouping: Grouping | None,
    cache_tokens: list[int],
) -> list[CacheUse]:
    """Use of caches of ``cache_tokens`` by group, or else of caches with certain shares of the max hits."""
    if grouping is None or groups is None or not curve.max_hit_blocks:
        return []
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    sizes = sizes or sorted({curve.size_for_share(share) for share in GROUPED_SHARES})
    return cache_use(accesses, groups, grouping, [size for size in sizes if size])


def curve_as_json(curve: "HitCurve", uses: list[CacheUse]) -> dict[str, Any]:
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


def describe(curve: "HitCurve", cache_tokens: list[int], kv_bytes: int | None = None) -> str:
    most = curve.max_hit_blocks
    blocks, whole = block_size_text(curve.block_size, curve.fine_block_size), curve.rate_at(len(curve.sizes))
    lines = [
        f"max hits (unlimited cache): {most:,} of {curve.lookup_blocks:,} full prompt blocks of {blocks}, "
        f"{whole:.2%} of input tokens"
    ]
    unknown = curve.requests - curve.whole_chains
    if unknown:
        lines.append(
            f"output blocks of {unknown:,} of {curve.requests:,} requests are unknown and left out: an engine may hit "
            "more"
        )
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    shares = [curve.hits_at(size) / most if most else 0.0 for size in sizes]
    if not cache_tokens and most:
        shares, sizes = [*SHARES], [curve.size_for_share(share) for share in SHARES]
    rows = []
    for share, size in zip(shares, sizes, strict=True):
        hits, tokens = curve.hits_at(size), size * curve.block_size
        gib = [] if kv_bytes is None else [factor(tokens * kv_bytes / GIB)]
        rows.append([f"{share:.0%}", f"{hits:,}", f"{curve.rate_at(size):.2%}", f"{size:,}", f"{tokens:,}", *gib])
    headings = ["% of max hits", "hit blocks", "% of input", "usable blocks", "cache tokens"]
    lines += table_lines([*headings, *([] if kv_bytes is None else ["GiB"])], rows) if rows else []
    return "\n".join(lines)


def cache_use(accesses: "Accesses", groups: Groups, grouping: Grouping, sizes: list[int]) -> list[CacheUse]:
    if not len(accesses.limits):
        return []
    needs, request_of, blocks = needed_sizes(accesses), accesses.request_of, accesses.blocks
    hits = [
        np.bincount(request_of[needs <= min(size, accesses.distinct)], minlength=len(accesses.limits)) for size in sizes
    ]
    weights = hits[sizes.index(max(sizes))] if sizes else accesses.limits
    shown, place = groups.largest(weights, grouping.most)  # the same groups at every size
    return [
        _use(accesses, blocks, groups, request_hits, size, shown=shown, place=place)
        for request_hits, size in zip(hits, sizes, strict=True)
    ]


def needed_sizes(accesses: "Accesses") -> IntArray:
    """The smallest cache in which each access hits; more than there are blocks: it hits in none."""
    recency, touched_by = (
        stackdepth.untouched(int(accesses.starts[-1]), accesses.distinct),
        np.full(accesses.distinct, -1),
    )
    depths = stackdepth.access_depths(
        recency, touched_by, accesses_of.Piece(0, accesses.blocks, accesses.starts)
    ).depths
    never = accesses.distinct + 1
    depths[(depths == 0) | ~accesses.may_hit] = never
    # One running maximum over all: a request's values lie above all values of the request before it.
    base = accesses.request_of * (never + 1)
    return np.asarray(np.maximum.accumulate(base + depths) - base)


def _use(
    accesses: "Accesses",
    blocks: Int32Array,
    groups: Groups,
    request_hits: IntArray,
    size: int,
    *,
    shown: list[int],
    place: IntArray,
) -> CacheUse:
    names, block_size = groups.shown_names(shown), accesses.block_size
    count, others = len(names), len(groups.names) - len(shown)
    nothing = [None] * (count - len(shown))
    inserted, held = stackdepth.resident_owners(blocks, accesses.starts, place, count, size)
    of_group = np.bincount(groups.of_request, request_hits, len(groups.names))
    hits, tokens, lookups = (
        np.bincount(place, weights, count).astype(np.int64)
        for weights in (request_hits, accesses.prompt_tokens, accesses.lookup_blocks)
    )
    columns = zip(
        names,
        np.bincount(place, minlength=count).tolist(),
        _sessions(groups, place, count),
        (groups.shared_blocks[shown] * block_size).tolist() + nothing,
        [groups.examples[number] for number in shown] + nothing,
        tokens.tolist(),
        lookups.tolist(),
        hits.tolist(),
        (hits * block_size).tolist(),
        _shares(hits * block_size, tokens).tolist(),
        _shares(hits, hits.sum()).tolist(),
        inserted.tolist(),
        _shares(inserted, inserted.sum()).tolist(),
        _shares(held, held.sum()).tolist(),
        strict=True,
    )
    fields = GroupUse.__slots__
    rest = np.delete(of_group, shown)
    return CacheUse(
        blocks=size,
        tokens=size * block_size,
        groups=[GroupUse(**dict(zip(fields, row, strict=True))) for row in columns],
        others=others,
        largest_other=int(rest.max(initial=0)) * block_size,
    )


def _sessions(groups: Groups, place: IntArray, count: int) -> list[int | None]:
    """Number of sessions that the requests at each place name; None: they name none."""
    named = groups.session_of >= 0
    pairs = np.unique(np.stack([place[named], groups.session_of[named]]), axis=1)
    return [number or None for number in np.bincount(pairs[0], minlength=count).tolist()]


def _shares(parts: IntArray, whole: object) -> FloatArray:
    return np.asarray(parts / np.maximum(np.asarray(whole, float), 1.0))


def describe_groups(groups: Groups | None, uses: list[CacheUse]) -> list[str]:
    if groups is None:
        return []
    lines = ["", groups.rule] if groups.rule else []
    if NO_CHAINS in groups.rule:
        return lines
    if len(uses) == 1:
        return lines + _describe_use(uses[0])
    return lines + (_describe_uses(uses) if uses else [])


def _describe_uses(uses: list[CacheUse]) -> list[str]:
    """Table of groups by cache sizes."""
    largest = max(uses, key=lambda use: use.blocks)
    names = short_names([group.name for group in largest.groups])
    rows = [
        [
            name,
            f"{group.requests:,}",
            *("–" if number is None else f"{number:,}" for number in (group.sessions, group.shared_tokens)),
            *(f"{use.groups[row].hit_tokens:,} ({use.groups[row].hit_rate:.2%})" for use in uses),
        ]
        for row, (name, group) in enumerate(zip(names, largest.groups, strict=True))
    ]
    headings = ["group", "requests", "sessions", "shared tokens", *(f"{use.blocks:,} blocks" for use in uses)]
    lines = ["", "tokens saved (hit rate) by usable blocks", *table_lines(headings, rows, "<")]
    if largest.others:
        lines.append(
            f"each of the {largest.others:,} others saves at most {largest.largest_other:,} tokens with "
            f"{largest.blocks:,} blocks"
        )
    return lines


def _describe_use(use: CacheUse) -> list[str]:
    headings = ["group", "tokens saved", "% of saved", "hit rate", "requests", "sessions", "shared tokens"]
    headings += ["% of inserted", "% of held", "example"]
    rows = [
        [
            name,
            f"{group.hit_tokens:,}",
            f"{group.hit_share:.2%}",
            f"{group.hit_rate:.2%}",
            f"{group.requests:,}",
            *("–" if number is None else f"{number:,}" for number in (group.sessions, group.shared_tokens)),
            f"{group.inserted_share:.2%}",
            f"{group.held_share:.2%}",
            group.example or "–",
        ]
        for name, group in zip(short_names([group.name for group in use.groups]), use.groups, strict=True)
    ]
    lines = ["", f"{use.blocks:,} usable blocks ({use.tokens:,} tokens)", *table_lines(headings, rows, "<")]
    if use.others:
        lines.append(f"each of the {use.others:,} others saves at most {use.largest_other:,} tokens")
    return lines
