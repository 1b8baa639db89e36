"""The bound of every eviction: Belady's pool against one that searches lists, every choice of blocks, and the pool."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cache.belady import BeladyPool
from sim.vllm.kvcache import single_group_cache
from sim.workload.chain import Chains, engine_chains, hashed_batches
from sim.workload.prompts import Prompts, lay_out, read_prompts
from tests.sim.cache.test_segments import BLOCK, traffic
from tests.sim.oracles.sequential import full_keys
from tracefile.files.reading import open_trace
from tracefile.records.batches import Batch
from tracefile.records.schema import BlockHash, Meta, Record, RequestId


@dataclass(frozen=True)
class Wanted:
    """A request: keys of the full blocks, limit of hits, and blocks needed at the end."""

    keys: Sequence[object]
    most_hits: int
    num_blocks: int
    known: int = 0
    """Leading keys that other requests may share."""


@dataclass
class SlowPool:
    """Belady's pool with linear searches over lists. ``future``: all requests."""

    usable: int
    future: Sequence[Wanted]
    cached: set[object] = field(default_factory=set)
    line: list[object] = field(default_factory=list)
    """Idle keys in order of release."""
    evicted: int = 0
    served: int = 0

    def serve(self, wanted: Wanted) -> int:
        looked_up = wanted.keys[: wanted.most_hits]
        hits = next((depth for depth, key in enumerate(looked_up) if key not in self.cached), len(looked_up))
        self._hold(wanted.keys[:hits])
        while self.usable - len(self.cached) < wanted.num_blocks - hits:
            self._hold(gone := [min(self.line, key=self._worth)])
            self.cached -= set(gone)
            self.evicted += 1
        self._hold(wanted.keys)
        self.cached |= set(wanted.keys)
        self.line += reversed(wanted.keys)
        self.served += 1
        return hits

    def _hold(self, keys: Sequence[object]) -> None:
        self.line = [key for key in self.line if key not in keys]

    def _worth(self, key: object) -> int:
        """0: the next request that has the key does not look it up, and caches it anyway; or none has it."""
        for number in range(self.served, len(self.future)):
            prompt = self.future[number]
            if key in prompt.keys[: prompt.known]:
                return len(self.future) - number if key in prompt.keys[: min(prompt.most_hits, prompt.known)] else 0
        return 0


def wanted(records: Sequence[Record], usable: int) -> list[Wanted]:
    """Return the requests that fit, as the slow pool has them."""
    chains, result = Chains(Meta(block_size=BLOCK)), []
    for record in records:
        keys, known = full_keys(record, chains), len(chains.hashed_keys(record))
        tokens = (record.prompt_tokens or 0) + max((record.output_tokens or 0) - 1, 0)
        most = min(((record.prompt_tokens or 1) - 1) // BLOCK, known)
        result.append(Wanted(keys, most, -(-tokens // BLOCK), known))
    return [prompt for prompt in result if prompt.num_blocks <= usable]


def belady_hits(records: Sequence[Record], usable: int) -> tuple[list[int], int]:
    subset = Batch(list(records))
    prompts = lay_out(subset, subset.hashes(), Chains(Meta(block_size=BLOCK)))
    pool = BeladyPool(prompts.select(prompts.fit(usable)), usable)
    return pool.run().tolist(), pool.evicted_blocks


@settings(max_examples=100, deadline=None)
@given(traffic(), st.integers(2, 60))
def test_belady_equals_the_slow_pool(records: list[Record], usable: int) -> None:
    prompts = wanted(records, usable)
    slow = SlowPool(usable, prompts)
    hits = [slow.serve(prompt) for prompt in prompts]
    assert belady_hits(records, usable) == (hits, slow.evicted)


def best_hits(rows: Sequence[Wanted], usable: int) -> int:
    """Most hits of any pool that evicts only for allocations, over every choice of kept keys."""

    @cache
    def best(number: int, retained: frozenset[object]) -> int:
        if number == len(rows):
            return 0
        row, later = rows[number], {key for other in rows[number + 1 :] for key in other.keys[: other.most_hits]}
        hits = next(
            (depth for depth, key in enumerate(row.keys[: row.most_hits]) if key not in retained), row.most_hits
        )
        remaining = (retained - frozenset(row.keys)) & later
        kept_at_most = min(usable - row.num_blocks, len(remaining))
        choices = itertools.combinations(sorted(remaining, key=str), kept_at_most)
        return hits + max(best(number + 1, frozenset(choice) | frozenset(row.keys)) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(traffic(), st.integers(2, 14))
def test_no_eviction_has_more_hits_than_belady(records: list[Record], usable: int) -> None:
    few = [record for record in records if wanted([record], usable)][:8]
    assert sum(belady_hits(few, usable)[0]) == best_hits(wanted(few, usable), usable)


def test_block_recomputed_before_lookup_is_evicted_first() -> None:
    """The third prompt, one full block, cannot hit it but caches it anew: the block behind it is worth more."""
    chains = [[2, 3], [5, 6], [2], [2, 3, 7]]
    records = [
        Record(
            request_id=RequestId(f"r{number}"), prompt_tokens=BLOCK * len(chain), block_hashes=[*map(BlockHash, chain)]
        )
        for number, chain in enumerate(chains)
    ]
    assert belady_hits(records, 3) == ([0, 0, 0, 2], 3)
    assert best_hits(wanted(records, 3), 3) == 2


@pytest.mark.parametrize(("size", "hits"), [(20, 1322), (50, 1744), (100, 2054), (200, 2314), (400, 2514)])
def test_single_objects_equal_libcachesim(size: int, hits: int) -> None:
    """libcachesim 0.3.5 on a loop over 700 objects between skewed draws of 300 further objects."""
    state, keys = 7, []
    for number in range(4000):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draw = (state >> 33) / 2**31
        keys.append(number % 700 + 10_000 if number % 3 == 0 else int(300 * draw**3))
    zeros, counts = np.zeros(len(keys), np.int64), np.ones(len(keys), np.int64)
    prompts = Prompts(
        block_size=4,
        prompt_tokens=5 * counts,
        computed_tokens=4 * counts,
        unread=zeros,
        turn=zeros,
        arrival_ms=np.zeros(len(keys)),
        hashed_blocks=counts,
        keys=np.array(keys, np.uint64),
    )
    assert BeladyPool(prompts, size).run().sum() == hits


ROOT = Path(__file__).parents[3]
CAPTURES = ROOT / "data/captures"


@pytest.mark.parametrize("trace", ["128x2/session-fast.jsonl.zst", "256x4/session-fast.jsonl.zst", "conversation"])
def test_vllms_pool_never_exceeds_belady(trace: str) -> None:
    path, folder = CAPTURES / trace, os.environ.get("KVTAPE_DATA")
    if trace == "conversation":
        if not folder:
            pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
        path = Path(folder) / "mooncake" / "conversation_trace.jsonl"
    with open_trace(path) as reader:
        chains = engine_chains(reader.meta, None)
        prompts = read_prompts(hashed_batches(reader), chains)
    for factor in (1, 2, 4, 16, 64):
        usable, size = factor * int(prompts.num_blocks.max()), prompts.block_size
        bound, cache = int(BeladyPool(prompts, usable).run().sum()), single_group_cache(size, usable)
        assert bound >= sum(cache.serve_alone(request) for request in prompts.requests()) // size > 0, usable
