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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.chain import Chains, hashed_records
from sim.hits import parse_block_size
from sim.stackdepth import count_depths
from tracefile.reading import open_trace

Int64Array = npt.NDArray[np.int64]
SHARES = (0.50, 0.80, 0.90, 0.95, 0.99, 1.00)


@dataclass(frozen=True, slots=True)
class Accesses:
    """A trace's prompts as one flat array of block numbers, for the one pass."""

    blocks: Int64Array
    """Dense numbers 0 … distinct − 1 of the full prompt blocks, request by request, root to leaf."""
    starts: Int64Array
    """Where each request's blocks start in ``blocks``; one more entry than requests."""
    limits: Int64Array
    """How many leading blocks each request may hit."""
    distinct: int
    block_size: int
    input_tokens: int


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits at every cache size from one block to where no more memory helps. Arrays of one length."""

    sizes: Int64Array
    """Cache sizes in blocks: 1, 2, 3 …"""
    hit_blocks: Int64Array
    """Prompt blocks hit at each size; never falls."""
    block_size: int
    lookup_blocks: int
    """Full prompt blocks of the whole trace."""
    input_tokens: int

    @property
    def hit_tokens(self) -> Int64Array:
        """Prompt tokens hit at each size."""
        return self.hit_blocks * self.block_size

    @property
    def attainable_blocks(self) -> int:
        """Hits of an endless cache."""
        return int(self.hit_blocks[-1]) if len(self.hit_blocks) else 0

    def hits_at(self, size: int) -> int:
        """Blocks hit by a cache of ``size`` blocks."""
        if size < 1 or not len(self.sizes):
            return 0
        return int(self.hit_blocks[min(size, len(self.sizes)) - 1])

    def size_for(self, hits: int) -> int:
        """The smallest cache, in blocks, that hits at least ``hits`` blocks."""
        return int(self.sizes[np.searchsorted(self.hit_blocks, hits)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``sim curve``."""
    parser.add_argument("trace", type=Path, help="a kvtape, Mooncake, Bailian or vllm-vcr trace with block hashes")
    parser.add_argument("--block-size", type=int, metavar="B", help="tokens in a block, a multiple of the trace's")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the whole curve")


def run(arguments: argparse.Namespace) -> int:
    """Compute the curve and print it."""
    curve = hit_curve(read_accesses(arguments.trace, parse_block_size(arguments.block_size)))
    print(json.dumps(curve_as_json(curve)) if arguments.json else describe(curve))
    return 0


def read_accesses(trace: Path, block_size: int | None = None) -> Accesses:
    """Read a trace's prompts. Raises InputError for a trace without hashes or a block size it cannot be read at."""
    blocks: list[int] = []
    starts = [0]
    limits: list[int] = []
    numbers: dict[int, int] = {}
    input_tokens = 0
    with open_trace(trace) as reader:
        chains = Chains(reader.meta, block_size)
        for record in hashed_records(reader):
            blocks += [numbers.setdefault(key, len(numbers)) for key in chains.prompt(record)]
            starts.append(len(blocks))
            prompt_tokens = record.prompt_tokens or 0
            limits.append((prompt_tokens - 1) // chains.block_size)
            input_tokens += prompt_tokens
    return Accesses(
        np.array(blocks, np.int64),
        np.array(starts, np.int64),
        np.array(limits, np.int64),
        len(numbers),
        chains.block_size,
        input_tokens,
    )


def hit_curve(accesses: Accesses) -> HitCurve:
    """Hits at every size, in O(blocks × log blocks)."""
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


def curve_as_json(curve: HitCurve) -> dict[str, Any]:
    """The curve as plain lists and numbers."""
    return {
        "block_size": curve.block_size,
        "lookup_blocks": curve.lookup_blocks,
        "input_tokens": curve.input_tokens,
        "sizes": curve.sizes.tolist(),
        "hit_blocks": curve.hit_blocks.tolist(),
        "hit_tokens": curve.hit_tokens.tolist(),
    }


def describe(curve: HitCurve) -> str:
    """The curve as a few lines for a terminal: what each share of the attainable hits costs."""
    attainable = curve.attainable_blocks
    rate = attainable * curve.block_size / curve.input_tokens if curve.input_tokens else 0.0
    lines = [
        f"attainable: {attainable:,} of {curve.lookup_blocks:,} full prompt blocks of {curve.block_size} tokens, "
        f"{rate:.2%} of input tokens"
    ]
    if attainable:
        lines.append(f"{'of attainable':>14} {'hit blocks':>12} {'cache blocks':>13} {'cache tokens':>15}")
    for share in SHARES if attainable else ():
        size = curve.size_for(-int(-attainable * share // 1))
        lines.append(f"{share:>14.0%} {curve.hits_at(size):>12,} {size:>13,} {size * curve.block_size:>15,}")
    return "\n".join(lines)
