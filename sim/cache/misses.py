"""``sim misses``: why prompt tokens were not served from a cache of one size, and who evicted whom."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from sim.cache.attribution import CAUSES, Attribution, Share, attribute, read_requests
from sim.cache.pool import parse_block_size, parse_blocks
from sim.vllm.config import FreeRule
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import Chains, hashed_records
from sim.workload.groups import add_group_arguments, grouping_of
from tracefile.files.reading import open_trace

_WIDTH = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``sim misses``."""
    parser.add_argument("trace", type=Path, help="a kvtape, Mooncake, Bailian or vllm-vcr trace with block hashes")
    parser.add_argument(
        "--blocks", default="inf", metavar="N", help="usable blocks (num_gpu_blocks less one), or inf (default)"
    )
    parser.add_argument(
        "--free-rule",
        choices=get_args(FreeRule),
        default="vllm",
        help="where freed blocks without a hash go: the queue's head (vllm) or its tail (append_all, older vLLM)",
    )
    parser.add_argument("--block-size", type=int, metavar="B", help="tokens in a block, a multiple of the trace's")
    add_group_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Attribute the misses and print the sums."""
    usable, grouping = parse_blocks(arguments.blocks), grouping_of(arguments)
    with open_trace(arguments.trace) as reader:
        refuse_other_attention(reader.meta, arguments.trace)
        chains = Chains(reader.meta, parse_block_size(arguments.block_size))
        requests = read_requests(hashed_records(reader), chains, grouping)
    found = attribute(requests, usable, arguments.free_rule, grouping)
    print(json.dumps(misses_as_json(found, str(arguments.trace))) if arguments.json else describe(found))
    return 0


def misses_as_json(found: Attribution, trace: str) -> dict[str, object]:
    """What ``--json`` prints, and ``report curve`` draws."""
    return {"kind": "misses", "trace": trace, **asdict(found)}


def describe(found: Attribution) -> str:
    """Tables for a terminal: tokens by cause, in shares of each row's prompt tokens."""
    size = "endless" if found.blocks is None else f"{found.blocks:,} blocks of {found.block_size} tokens"
    lines = [f"{size}: {found.total.input_tokens:,} prompt tokens of {found.total.requests:,} requests, by cause"]
    if found.rejected:
        lines.append(f"{found.rejected:,} requests do not fit the pool and were left out")
    lines.append(f"{'':>{_WIDTH}} {'tokens':>14} " + " ".join(f"{cause.replace('_', ' '):>13}" for cause in CAUSES))
    lines += [_row(share) for share in (found.total, *found.cohorts, *found.groups)]
    if found.by is not None:
        lines += _matrix(found)
    return "\n".join(lines)


def _row(share: Share) -> str:
    whole = share.input_tokens or 1
    cells = " ".join(f"{tokens / whole:>13.2%}" for tokens in share.tokens.values())
    return f"{_short(share.name):>{_WIDTH}} {share.input_tokens:>14,} {cells}"


def _matrix(found: Attribution) -> list[str]:
    """Who evicted whom, in blocks that were asked for again."""
    names = [share.name for share in found.groups]
    lines = ["", f"blocks evicted by (row) and asked for again by (column), by {found.by}"]
    lines.append(f"{'':>{_WIDTH}} " + " ".join(f"{number:>9}" for number in range(1, len(names) + 1)))
    for number, (name, row) in enumerate(zip(names, found.evictions, strict=True), 1):
        lines.append(f"{number:>3} {_short(name, 4):>{_WIDTH - 4}} " + " ".join(f"{count:>9,}" for count in row))
    return lines


def _short(name: str, less: int = 0) -> str:
    most = _WIDTH - less
    return name if len(name) <= most else name[: most - 1] + "…"
