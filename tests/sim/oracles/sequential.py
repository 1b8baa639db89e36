"""Requests one at a time through the plain pool, and through the compiled one, for tests that compare them."""

from collections.abc import Sequence

from sim.cache.pool import HitCounts
from sim.vllm.kvcache import single_group_cache
from sim.workload.chain import Chains, tokens_computed
from sim.workload.prompts import lay_out
from tests.sim.oracles.readable.pool import BlockPool
from tracefile.records.batches import Batch
from tracefile.records.schema import Record


def full_keys(record: Record, chains: Chains) -> list[int]:
    """Return the keys of the blocks that are full at the end."""
    return chains.block_keys(record)[: tokens_computed(record) // chains.block_size]


def plain_hits(records: Sequence[Record], chains: Chains, usable: int) -> HitCounts:
    """Rules 1 to 11 of docs/simulator.md, block by block."""
    pool, size = BlockPool(usable + 1, chains.block_size), chains.block_size
    counts = HitCounts(block_size=size, usable_blocks=usable)
    for record in records:
        counts.requests += 1
        held = -(-tokens_computed(record) // size)
        if held > usable:
            counts.rejected += 1
            continue
        keys = full_keys(record, chains)
        most = 0 if record.prompt_logprobs else ((record.prompt_tokens or 1) - 1) // size
        hits = pool.lookup(keys, most)
        pool.touch(hits)
        blocks = hits + pool.allocate(held - len(hits))
        pool.insert(blocks[len(hits) : len(keys)], keys[len(hits) :])
        pool.free_blocks(blocks)
        counts.count_tokens(record, len(hits) * size)
    counts.evicted_blocks = pool.evicted_blocks
    return counts


def compiled_hits(records: Sequence[Record], chains: Chains, usable: int | None) -> HitCounts:
    """The same by ``sim pool``'s pool."""
    batch = Batch(list(records))
    cache = single_group_cache(chains.block_size, usable)
    counts = HitCounts(requests=len(records), block_size=chains.block_size, usable_blocks=usable)
    for record, request in zip(records, lay_out(batch, batch.hashes(), chains).requests(), strict=True):
        hit_tokens = int(cache.serve_alone(request))
        if hit_tokens < 0:
            counts.rejected += 1
        else:
            counts.count_tokens(record, hit_tokens)
    counts.evicted_blocks = int(cache.evicted_blocks())
    return counts
