"""``sim misses``: the cause of every prompt token that a cache of one size did not serve.

The pool is that of ``sim pool``: one request at a time, in file order, and to the block the same hits. A block is
always evicted before its parent, so a chain is cached from its beginning on. A request's prompt blocks are therefore
runs: hits, perhaps one block that holds the last token, evicted blocks, blocks never computed before, and blocks
without a known hash.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from measure.cache import interning
from measure.table import table_lines
from report.output import page_path, write_page
from sim.cache import pages, sequential_pool
from sim.cache.pool import parse_block_size, parse_usable_blocks, size_text
from sim.cache.results import Attribution, CauseShare
from sim.cache.sequential_pool import Records, Requests
from sim.vllm.settings import refuse_other_attention
from sim.workload.chain import Chains, engine_chains, hashed_batches, in_file_order
from tracefile.files.reading import open_trace
from tracefile.records.arrays import IntArray
from tracefile.records.batches import Batch, Hashes

CAUSES = ("hit", "cold", "evicted", "last_token", "prompt_logprobs", "partial_block", "hash_unknown")
"""Causes of a prompt token; docs/curves.md defines each."""
COHORTS = ("turn 1", "turns 2+", "turn unknown")
ALL = "all"


@dataclass(frozen=True, slots=True)
class Prompts:
    """A whole trace's requests with a prompt length, in file order."""

    requests: Requests
    cohort: IntArray
    """Place in ``COHORTS`` of each request."""
    block_size: int


def run(arguments: argparse.Namespace) -> int:
    usable_blocks = parse_usable_blocks(arguments.num_gpu_blocks)
    with open_trace(arguments.trace) as reader:
        refuse_other_attention(reader.meta, arguments.trace, "sim pool --kv-groups")
        chains = engine_chains(reader.meta, parse_block_size(arguments.block_size))
        prompts = lay_out(in_file_order(hashed_batches(reader)), chains)
    found = attribute(prompts, usable_blocks)
    found_json = {"kind": "misses", "trace": str(arguments.trace), **asdict(found)}
    html = page_path(arguments, [arguments.trace])
    print(json.dumps(found_json) if arguments.json else describe(found))
    if html is not None:
        write_page(html, pages.misses_page(str(arguments.trace), found))
    return 0


def lay_out(batches: Iterable[tuple[Batch, Hashes]], chains: Chains) -> Prompts:
    turns = [np.empty(0, np.int64)]

    def noted() -> Iterator[tuple[Batch, Hashes]]:
        for batch, hashes in batches:
            rows = np.flatnonzero(batch.numbers("prompt_tokens") > 0)
            turns.append(batch.numbers("turn")[rows])  # 0: unknown; turns count from 1
            yield batch, hashes

    requests = sequential_pool.read_requests(noted(), chains)
    turn = np.concatenate(turns)
    cohort = np.where(turn == 0, 2, np.minimum(turn, 2) - 1)
    return Prompts(requests, cohort, chains.block_size)


def attribute(prompts: Prompts, usable_blocks: int | None) -> Attribution:
    """Run the pool of ``usable_blocks`` (None: unlimited) and give every prompt token its cause."""
    interner = interning.Interner()
    numbers = interner.number(prompts.requests.keys)
    requests = prompts.requests._replace(keys=numbers.astype(np.uint64))
    pool = sequential_pool.SequentialPool(requests, usable_blocks)
    fits = pool.fits
    hits = pool.run_noting_evictions(interner.distinct)
    causes = _causes(pool.requests, hits, prompts.requests.prompt_tokens[fits], prompts.block_size)
    return Attribution(
        block_size=prompts.block_size,
        usable_blocks=usable_blocks,
        rejected=int((~fits).sum()),
        total=_shares((ALL,), np.zeros_like(prompts.cohort)[fits], causes)[0],
        cohorts=[share for share in _shares(COHORTS, prompts.cohort[fits], causes) if share.requests],
    )


def _causes(requests: Records, rows: IntArray, prompt_tokens: IntArray, block_size: int) -> IntArray:
    """Tokens by cause of the requests that ran, shape (requests, causes)."""
    full, partial = np.divmod(prompt_tokens, block_size)
    hits, cached, seen = rows
    known, unread = requests["prompt_blocks"], requests["prompt_logprobs"] > 0
    blocks = {
        "hit": hits,
        "cold": known - seen,
        "evicted": seen - cached,
        "last_token": np.where(unread, 0, cached - hits),
        "prompt_logprobs": np.where(unread, cached, 0),
        "hash_unknown": full - known,
    }
    causes = {cause: count * block_size for cause, count in blocks.items()}
    causes["partial_block"] = partial
    nothing = np.zeros_like(partial)
    return np.stack([causes.get(cause, nothing) for cause in CAUSES], axis=1)


def _shares(names: tuple[str, ...], place: IntArray, causes: IntArray) -> list[CauseShare]:
    tokens = np.zeros((len(names), len(CAUSES)), np.int64)
    np.add.at(tokens, place, causes)
    requests = np.bincount(place, minlength=len(names))
    return [
        CauseShare(
            name=name,
            requests=int(requests[row]),
            input_tokens=int(tokens[row].sum()),
            tokens=dict(zip(CAUSES, tokens[row].tolist(), strict=True)),
        )
        for row, name in enumerate(names)
    ]


def describe(found: Attribution) -> str:
    size = size_text(found.usable_blocks, found.block_size)
    lines = [f"{size}: {found.total.input_tokens:,} prompt tokens of {found.total.requests:,} requests, by cause"]
    if found.rejected:
        lines.append(f"{found.rejected:,} requests do not fit the pool and were left out")
    shown = [cause for cause in CAUSES if cause != "prompt_logprobs" or found.total.tokens[cause]]
    headings = ["", "tokens", *(cause.replace("_", " ") for cause in shown)]
    lines += table_lines(headings, [_row(share, shown) for share in (found.total, *found.cohorts)])
    return "\n".join(lines)


def _row(share: CauseShare, shown: Sequence[str]) -> list[str]:
    whole = share.input_tokens or 1
    shares = (f"{share.tokens[cause] / whole:.2%}" for cause in shown)
    return [share.name, f"{share.input_tokens:,}", *shares]
