"""``sim misses``: cause of each prompt token that a prefix cache of one size did not serve.

The block pool is the pool of ``sim pool``: one request at a time, in file order, with the same hits. A block is always
evicted before its parent, so a chain is cached from its root on. The prompt blocks of a request are therefore runs:
hits, perhaps the block of the last token, evicted blocks, blocks never computed before, and blocks without a hash.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from measure.cache import interning
from measure.table import table_lines
from sim.cache.pool import parse_block_size, parse_usable_blocks, size_text
from sim.vllm import kvcache
from sim.vllm.settings import refuse_other_attention
from sim.workload import prompts as prompting
from sim.workload.chain import engine_chains, hashed_batches, in_file_order
from sim.workload.prompts import Prompts
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray

CAUSES = ("hit", "cold", "evicted", "last_token", "prompt_logprobs", "partial_block", "hash_unknown")
"""Causes of a prompt token, as docs/curves.md defines them."""
COHORTS = ("turn 1", "turns 2+", "turn unknown")
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """Prompt tokens of a cohort by cause; their sum is ``input_tokens``."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]
    """Tokens by cause; docs/curves.md defines the causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Prompt tokens of a trace by cause."""

    block_size: int
    usable_blocks: int | None
    """Null: unlimited."""
    rejected: int
    """Requests that alone do not fit the pool; excluded from all counts."""
    total: CauseShare
    cohorts: list[CauseShare]
    """Shares by turn; without empty cohorts."""


def run(arguments: argparse.Namespace) -> int:
    usable_blocks = parse_usable_blocks(arguments.num_gpu_blocks)
    with open_trace(arguments.trace) as reader:
        refuse_other_attention(reader.meta, arguments.trace, "sim pool --kv-groups")
        chains = engine_chains(reader.meta, parse_block_size(arguments.block_size))
        prompts = prompting.read_prompts(in_file_order(hashed_batches(reader)), chains)
    misses = attribute(prompts, usable_blocks)
    fields = {"kind": "misses", "trace": str(arguments.trace), **asdict(misses)}
    print(json.dumps(fields) if arguments.json else describe(misses))
    return 0


def attribute(prompts: Prompts, usable_blocks: int | None) -> Attribution:
    """Run a block pool of ``usable_blocks`` (None: unlimited) and count prompt tokens by cause."""
    fitting = prompts.select(prompts.fit(usable_blocks))
    causes = _causes(fitting, usable_blocks)
    cohort = np.where(fitting.turn == 0, 2, np.minimum(fitting.turn, 2) - 1)
    return Attribution(
        block_size=prompts.block_size,
        usable_blocks=usable_blocks,
        rejected=len(prompts) - len(fitting),
        total=_shares((ALL,), np.zeros_like(cohort), causes)[0],
        cohorts=[share for share in _shares(COHORTS, cohort, causes) if share.requests],
    )


def _causes(prompts: Prompts, usable_blocks: int | None) -> IntArray:
    """Return prompt tokens by cause, shape (requests, causes)."""
    block_size, interner = prompts.block_size, interning.Interner()
    cache, cached, hit_tokens = kvcache.single_group_cache(block_size, usable_blocks), [], []
    hashed = prompts.prompt_blocks
    for request, blocks in zip(prompts.requests(), hashed.tolist(), strict=True):
        cached.append(cache.pool.lookup(request, blocks))
        hit_tokens.append(cache.serve_alone(request))
    computed = interning.unlimited_hits(interner.number(prompts.keys), prompts.starts, hashed, interner.distinct)
    hit, in_pool = np.array(hit_tokens, np.int64), np.array(cached, np.int64) * block_size
    full, partial = np.divmod(prompts.prompt_tokens, block_size)
    causes = {
        "hit": hit,
        "cold": (hashed - computed) * block_size,
        "evicted": computed * block_size - in_pool,
        "last_token": np.where(prompts.unread > 0, 0, in_pool - hit),
        "prompt_logprobs": np.where(prompts.unread > 0, in_pool - hit, 0),
        "partial_block": partial,
        "hash_unknown": (full - hashed) * block_size,
    }
    return np.stack([causes[cause] for cause in CAUSES], axis=1)


def _shares(names: tuple[str, ...], cohort: IntArray, causes: IntArray) -> list[CauseShare]:
    tokens = np.zeros((len(names), len(CAUSES)), np.int64)
    np.add.at(tokens, cohort, causes)
    requests = np.bincount(cohort, minlength=len(names))
    return [
        CauseShare(
            name=name,
            requests=int(requests[row]),
            input_tokens=int(tokens[row].sum()),
            tokens=dict(zip(CAUSES, tokens[row].tolist(), strict=True)),
        )
        for row, name in enumerate(names)
    ]


def describe(misses: Attribution) -> str:
    size = size_text(misses.usable_blocks, misses.block_size)
    lines = [f"{size}: {misses.total.input_tokens:,} prompt tokens of {misses.total.requests:,} requests, by cause"]
    if misses.rejected:
        lines.append(f"{misses.rejected:,} requests do not fit the pool; not counted")
    shown = [cause for cause in CAUSES if cause != "prompt_logprobs" or misses.total.tokens[cause]]
    headings = ["", "tokens", *(cause.replace("_", " ") for cause in shown)]
    lines += table_lines(headings, [_row(share, shown) for share in (misses.total, *misses.cohorts)])
    return "\n".join(lines)


def _row(share: CauseShare, shown: Sequence[str]) -> list[str]:
    total = share.input_tokens or 1
    shares = (f"{share.tokens[cause] / total:.2%}" for cause in shown)
    return [share.name, f"{share.input_tokens:,}", *shares]
