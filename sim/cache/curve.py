"""``sim curve``: prefix hits of a trace at every cache size, in one pass, and block reuse."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines.modelconfig import kv_bytes_per_token
from measure.cache import hitcurve
from measure.cache.accesses import Accesses, HashedChains, lay_out_accesses
from measure.cache.hitcurve import HitCurve
from measure.cache.interning import Interner, join_chains, pack_chains
from measure.metrics.flags import checked_kv_bytes
from measure.number_format import cache_size, factor, share
from measure.table import table_lines
from report.output import page_path, write_page
from report.pages.figures import axis, figure, line
from report.pages.panels import Page, Panel
from sim.cache import reuse as reusing
from sim.cache.pool import block_size_text, parse_block_size
from sim.workload.arrivals import require_times
from sim.workload.chain import engine_chains, hashed_batches
from sim.workload.prompts import join_prompts, lay_out
from tracefile.files.reading import open_trace
from tracefile.records.errors import InputError

SHARES = (0.50, 0.80, 0.90, 0.95, 0.99, 1.00)
MOST_NUMBER = 1 << 53
GIB = 2**30
MOST_POINTS = 600
"""Most points of a line, spaced evenly on the log axis."""
HEADLINE_SHARE = 0.9
"""Share of an unlimited cache's hits at the cache size in the headline."""


def run(arguments: argparse.Namespace) -> int:
    block_size, cache_tokens = parse_block_size(arguments.block_size), parse_numbers(arguments.cache_tokens)
    kv_bytes = _kv_bytes(arguments)
    accesses = read_accesses(arguments.trace, block_size, needs_times=arguments.reuse)
    curve = hitcurve.hit_curve(accesses)
    reuse = reusing.measure_reuse(accesses) if arguments.reuse else None
    html = page_path(arguments, [arguments.trace])
    if html is not None:
        write_page(html, curve_page(str(arguments.trace), curve, kv_bytes))
    if arguments.json:
        curve_json = {**curve_as_json(curve), "kv_bytes_per_token": kv_bytes}
        result = {"kind": "curve", "trace": str(arguments.trace), "curves": [curve_json]}
        print(json.dumps({**result, "reuse": None if reuse is None else asdict(reuse)}))
        return 0
    lines = [describe(curve, cache_tokens, kv_bytes), *([] if reuse is None else reusing.describe_reuse(reuse))]
    print("\n".join(lines))
    return 0


def read_accesses(trace: Path, block_size: int | None = None, *, needs_times: bool = False) -> Accesses:
    """Read the block accesses of a trace in order of arrival; file order if a time is missing.

    Raises InputError without block hashes, or if ``needs_times`` and a time is missing.
    """
    interner, packed, parts = Interner(), [], []
    with open_trace(trace) as reader:
        chains = engine_chains(reader.meta, block_size)
        for batch, hashes in hashed_batches(reader):
            prompts = lay_out(batch, hashes, chains)
            if needs_times:
                prompted = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
                ids = batch.column("request_id")
                require_times(reader.path, [ids[row] for row in prompted.tolist()], prompts.arrival_ms)
            packed.append(pack_chains(interner.number(prompts.keys), prompts.hashed_blocks))
            parts.append(replace(prompts, keys=prompts.keys[:0]))
    prompts = join_prompts(parts)
    return lay_out_accesses(
        HashedChains(
            chains=join_chains(packed),
            numbers=interner.distinct,
            hashed_blocks=prompts.hashed_blocks,
            prompt_tokens=prompts.prompt_tokens,
            prompt_logprobs=prompts.unread,
            arrival_ms=prompts.arrival_ms,
            block_size=chains.block_size,
            fine_block_size=chains.fine_block_size,
            complete_chains=int((prompts.hashed_blocks >= prompts.full_blocks).sum()),
        )
    )


def _kv_bytes(arguments: argparse.Namespace) -> int | None:
    """Return KV cache bytes per token; None: not set. Raises InputError."""
    kv_bytes = checked_kv_bytes(arguments.kv_bytes_per_token)
    if kv_bytes is not None and arguments.model_config is not None:
        raise InputError("--model-config: given with --kv-bytes-per-token; expected one of them")
    return kv_bytes if arguments.model_config is None else kv_bytes_per_token(arguments.model_config)


def parse_numbers(text: str | None) -> list[int]:
    """Parse ``--cache-tokens``: distinct positive numbers, ascending. Raises InputError."""
    try:
        numbers = sorted({int(word) for word in text.split(",")}) if text is not None else []
    except ValueError:
        numbers = [0]
    if numbers and not 1 <= numbers[0] <= numbers[-1] <= MOST_NUMBER:
        raise InputError(f"--cache-tokens: {text!r}; expected numbers from 1 to {MOST_NUMBER} with commas between")
    return numbers


def curve_as_json(curve: HitCurve) -> dict[str, Any]:
    return {
        "block_size": curve.block_size,
        "lookup_blocks": curve.lookup_blocks,
        "input_tokens": curve.input_tokens,
        "requests": curve.requests,
        "complete_chains": curve.complete_chains,
        "sizes": curve.sizes.tolist(),
        "hit_blocks": curve.hit_blocks.tolist(),
        "bound_blocks": curve.bound_blocks.tolist(),
        "hit_tokens": curve.hit_tokens.tolist(),
    }


def describe(curve: HitCurve, cache_tokens: list[int], kv_bytes: int | None = None) -> str:
    most = curve.max_hit_blocks
    blocks, hit_rate = block_size_text(curve.block_size, curve.fine_block_size), curve.rate_at(len(curve.sizes))
    lines = [
        f"max hits (unlimited cache): {hit_rate:.2%} of input tokens, "
        f"{most:,} of {curve.lookup_blocks:,} full prompt blocks",
        f"block size: {blocks}",
    ]
    unknown = curve.requests - curve.complete_chains
    if unknown:
        lines.append(
            f"{unknown:,} of {curve.requests:,} requests have output blocks without hashes, which are left out: an "
            "engine may hit more"
        )
    sizes = [tokens // curve.block_size for tokens in cache_tokens]
    shares = [curve.hits_at(size) / most if most else 0.0 for size in sizes]
    if not cache_tokens and most:
        shares, sizes = [*SHARES], [curve.size_for_share(level) for level in SHARES]
    rows = []
    for level, size in zip(shares, sizes, strict=True):
        hits, tokens = curve.hits_at(size), size * curve.block_size
        gib = [] if kv_bytes is None else [factor(tokens * kv_bytes / GIB)]
        rows.append([f"{level:.0%}", f"{hits:,}", f"{curve.rate_at(size):.2%}", f"{size:,}", f"{tokens:,}", *gib])
    headings = ["% of max hits", "hit blocks", "% of input", "usable blocks", "cache tokens"]
    lines += table_lines([*headings, *([] if kv_bytes is None else ["GiB"])], rows) if rows else []
    return "\n".join(lines)


def curve_page(trace: str, curve: HitCurve, kv_bytes: int | None) -> Page:
    """Return the page of ``sim curve``; ``kv_bytes``: KV cache bytes per token, to show sizes in memory."""
    return Page(
        tool="sim curve",
        title=trace,
        defined="docs/curves.md",
        headlines=[_headline(curve, kv_bytes) if curve.max_hit_blocks else f"Prefix cache of {trace}"],
        panels=[_hit_panel(curve)] if len(curve.sizes) else [],
    )


def _headline(curve: HitCurve, kv_bytes: int | None) -> str:
    """Return the cache size with 90 % of the prefix hits of an unlimited cache."""
    blocks = curve.size_for_share(HEADLINE_SHARE)
    size = f"{blocks:,} blocks ({cache_size(blocks * curve.block_size, kv_bytes)})"
    hit_rate, unlimited = (share(curve.rate_at(size)) for size in (blocks, len(curve.sizes)))
    return (
        f"{HEADLINE_SHARE:.0%} of max hits at {size} of {curve.block_size} tokens. "
        f"That is {hit_rate} of prompt tokens; an unlimited cache hits {unlimited}."
    )


def _hit_panel(curve: HitCurve) -> Panel:
    sizes = np.unique(np.geomspace(1, len(curve.sizes), MOST_POINTS).astype(int)).tolist()
    x, y = [size * curve.block_size for size in sizes], [round(curve.rate_at(size), 6) for size in sizes]
    hover = "%{y:,} at %{x:,}<extra></extra>"
    curve_line = line(x, y, 0, showlegend=False, line={"shape": "hv"}, hovertemplate=hover)
    y_axis = axis("hit tokens of prompt tokens", tickformat=".0%", rangemode="tozero")
    title = "Hits by cache size"
    return Panel(
        chapter=title,
        title=title,
        id="hits",
        figure=figure([curve_line], axis("cache (tokens)", type="log"), y_axis),
        caption="Share of prompt tokens that an LRU of full blocks serves. Output blocks count where their hashes "
        "are known.",
    )
