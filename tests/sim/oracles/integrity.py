"""Integrity of the simulator's objects: AssertionError unless their parts agree, whatever was done to them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sim.llamacpp.slots import Chain, SlotCache
from sim.serving.realtime import RealTimeEngine
from sim.sglang.radix import RadixNode, RadixTree
from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import RUNNING, WAITING, Request
from sim.vllm.scheduler import Scheduler
from sim.vllm.segments import Copy, SegmentPool
from tests.sim.oracles.readable.hybrid import HybridScheduler
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.rules import blocks_for
from tests.sim.oracles.readable.scheduler import Scheduler as ReadableScheduler


def check_pool(pool: BlockPool, held: Iterable[Sequence[int]] | None = None) -> None:
    """Queue, references and cache agree; ``held``: every holder's blocks, if known."""
    order = pool.free_order()
    assert len(order) == len(set(order)) == pool.num_free, "the queue's length is not num_free"
    assert set(order) == {b for b in range(1, pool.num_gpu_blocks) if pool._references[b] == 0}
    for block in (0, *order):
        assert pool._previous_free[pool._next_free[block]] == block, f"block {block}: links disagree"
    assert pool._references[0] == 0, "the null block is held"
    assert pool._key[0] is None, "the null block is cached"
    check_cache(pool)
    if held is not None:
        counts = [0] * pool.num_gpu_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == pool._references, "references are not the holders'"
    repeated = sum(references - 1 for references in pool._references if references > 1)
    assert repeated == pool.num_repeated, "the repeated holds are not the references beyond the first"


def check_cache(pool: BlockPool) -> None:
    keyed = {(block, key) for block in range(pool.num_gpu_blocks) for key in pool.keys_of(block)}
    in_line = {
        (block, key) for key, line in pool._cached.items() for block in (line if isinstance(line, dict) else (line,))
    }
    assert keyed == in_line, "the blocks' keys are not the cache's"


def check_segments(pool: SegmentPool, requests: Iterable[Request]) -> None:
    """The free queue and the requests' blocks are all blocks of the pool, each once, with as many holders as hold."""
    free, copy = [], pool._queue.after
    while copy is not pool._queue:
        assert copy.references == 0, "a held copy is in the free queue"
        assert copy.after.before is copy, "the links of the free queue disagree"
        free.append(copy)
        copy = copy.after
    assert pool.num_unhashed + sum(map(blocks_of, free)) == pool.num_free, "the queue's length is not num_free"
    holders: Counter[Copy] = Counter()
    unhashed = 0
    for request in requests:
        holders.update(copies := copies_of(request))
        unhashed += request.num_blocks - sum(map(blocks_of, copies))
    assert pool.num_free + unhashed + sum(map(blocks_of, holders)) == pool.num_blocks, "blocks are lost"
    assert all(copy.references == count for copy, count in holders.items()), "references are not the holders'"
    repeated = sum((count - 1) * blocks_of(copy) for copy, count in holders.items())
    assert repeated == pool.num_repeated, "the repeated holds are not the references beyond the first"


def blocks_of(copy: Copy) -> int:
    return copy.segment.end - copy.segment.start


def copies_of(request: Request) -> list[Copy]:
    copies: list[Copy] = []
    for hold in request.blocks:
        copies.append(hold.copy)
        while copies[-1].segment.end != hold.end:
            copies.append(copies[-1].deeper)
    return copies


def check_scheduler(scheduler: Scheduler) -> None:
    for request in scheduler.waiting:
        assert request.status == WAITING, f"{request.request_id} waits as {request.status}"
        assert request.num_computed == 0, f"{request.request_id} waits and has computed tokens"
    for request in scheduler.running:
        assert request.status == RUNNING, f"{request.request_id} runs as {request.status}"
        assert request.num_computed <= request.num_tokens + request.placeholders
    cache = scheduler.cache
    if isinstance(cache, SingleGroupCache):
        assert not any(request.num_blocks for request in scheduler.waiting), "a request waits and holds blocks"
        for request in scheduler.running:
            held = cache.blocks_for(request.num_computed)
            assert request.num_blocks == held, f"{request.request_id} holds {request.num_blocks} of {held} blocks"
            assert request.num_hashed <= request.num_computed // cache.block_size
        check_segments(cache.pool, scheduler.running)


def check_readable(scheduler: ReadableScheduler) -> None:
    if isinstance(scheduler, HybridScheduler):
        tables = (table for running in scheduler.running for table in scheduler.cache.tables(running))
        check_pool(scheduler.pool, [[block for block in table if block] for table in tables])
        return
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    for request in scheduler.waiting:
        assert request.state == "waiting", f"{request.request_id} waits as {request.state}"
        assert not request.blocks, f"{request.request_id} waits and holds blocks"
        assert request.num_computed == 0, f"{request.request_id} waits and has computed tokens"
    for request in scheduler.running:
        assert request.state == "running", f"{request.request_id} runs as {request.state}"
        held = blocks_for(request.num_computed, scheduler.config.block_size)
        assert len(request.blocks) == held, f"{request.request_id} holds {len(request.blocks)} of {held} blocks"
        assert request.num_hashed <= request.num_computed // scheduler.config.block_size
        assert request.num_computed <= request.num_tokens + request.placeholders
    check_pool(scheduler.pool, [request.blocks for request in scheduler.running])


def check_engine(engine: RealTimeEngine) -> None:
    engine.flush()
    check_scheduler(engine.scheduler)
    for index, generation in engine._generations.items():
        assert generation.request.index == index
        assert generation.outcome is None, f"{generation.request.request_id} ended and is kept"
        assert generation.delivered == generation.request.num_generated
    held = {request.index for request in (*engine.scheduler.running, *engine.scheduler.waiting)}
    assert held == {index for index, generation in engine._generations.items() if generation.entered}


def check_slots(cache: SlotCache) -> None:
    """No saved chain is contained in another, and the prompt cache is within its bound."""
    bound = cache._config.cache_ram_tokens
    assert sum(chain.tokens for chain in saved_chains(cache)) == cache._saved.tokens
    assert bound is None or cache._saved.tokens <= bound
    for chain in saved_chains(cache):
        assert chain.tokens > 0
        assert sum(cache._common(other, chain) == chain.tokens for other in saved_chains(cache)) == 1


def check_tree(tree: RadixTree) -> None:
    evictable = protected = 0
    for node in radix_nodes(tree):
        parent, size = node.parent, tree.block_size
        assert parent is not None
        assert parent.children[node.keys[0]] is node
        assert node.start == parent.end < node.end
        assert len(node.keys) == -(-node.end // size) - node.start // size
        assert parent is tree.root or parent.locks >= sum(child.locks for child in parent.children.values())
        assert node.queued or node.children or node.locks, "an evictable leaf that nobody would find"
        evictable += 0 if node.locks else len(node)
        protected += len(node) if node.locks else 0
    assert (evictable, protected) == (tree.evictable_tokens, tree.protected_tokens)
    assert len({id(node) for _, node in tree._queue}) == len(tree._queue)


def radix_nodes(tree: RadixTree) -> Iterator[RadixNode]:
    """All nodes but the root, parents first."""
    pending = list(tree.root.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending += node.children.values()


def saved_chains(cache: SlotCache) -> list[Chain]:
    """The prompt cache, oldest first."""
    saved = cache._saved
    return [saved._chains[position] for position in np.argsort(saved._ages)]
