"""Policies of eviction: the compiled pool against one that searches lists, and Belady's against every choice."""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cache.onebyone import REQUEST, OneByOnePool, lay_out
from sim.kernels.blocks import NO_SERIAL
from sim.vllm.eviction import POLICIES
from sim.workload.chain import Chains
from tests.sim.cache.test_segments import BLOCK, traffic
from tests.sim.oracles.slow_eviction import SlowPool, Wanted
from tracefile import Meta, Record
from tracefile.records.batches import RecordBatch

OBJECTS = {  # hits of libcachesim 0.3.5 by cache size on ``objects()``; its LFU agrees too
    "lru": [596, 888, 1184, 1590, 2011],
    "fifo": [505, 783, 1050, 1413, 1804],
    "arc": [928, 1275, 1633, 2008, 2230],
    "s3-fifo": [969, 1290, 1632, 1997, 2319],
    "sieve": [916, 1222, 1600, 1907, 2210],
    "lfu": [885, 1273, 1600, 1907, 2210],
    "belady": [1322, 1744, 2054, 2314, 2514],
}
CHOICES = [*POLICIES[1:], "ttl:after=20ms", "tail:threshold=12:next=4"]


def wanted(records: Sequence[Record], usable: int) -> list[Wanted]:
    """Return the requests that fit, as the slow pool has them."""
    chains, found = Chains(Meta(block_size=BLOCK)), []
    for number, record in enumerate(records):
        keys, known = chains.whole(record), len(chains.known(record))
        tokens = (record.prompt_tokens or 0) + max((record.output_tokens or 0) - 1, 0)
        most = min(((record.prompt_tokens or 1) - 1) // BLOCK, known)
        found.append(Wanted(keys, most, -(-tokens // BLOCK), known, 7.0 * number, number * number % 5))
    return [one for one in found if one.num_blocks <= usable]


def compiled_hits(records: Sequence[Record], usable: int, evict: str) -> tuple[list[int], int]:
    some = RecordBatch(list(records))
    part = lay_out(some, some.hashes(), Chains(Meta(block_size=BLOCK)))
    part.requests["arrival_ms"] = 7.0 * np.arange(len(records))
    part.requests["worth"] = np.arange(len(records)) ** 2 % 5
    requests = part.requests[part.fits(usable)]
    pool = OneByOnePool(usable, "vllm", evict, requests, BLOCK)
    return pool.run(part.keys, requests).tolist(), pool.evicted_blocks


@settings(max_examples=150, deadline=None)
@given(traffic(), st.integers(2, 60), st.sampled_from(CHOICES))
def test_every_policy_does_what_the_slow_pool_does(records: list[Record], usable: int, evict: str) -> None:
    asked = wanted(records, usable)
    slow = SlowPool(usable, evict, BLOCK, asked)
    hits = [slow.serve(one) for one in asked]
    assert compiled_hits(records, usable, evict) == (hits, slow.evicted)


def best_hits(asked: Sequence[Wanted], usable: int) -> int:
    """Most hits of any pool that evicts only to make room, over every choice of what to keep."""

    @cache
    def best(number: int, kept: frozenset[object]) -> int:
        if number == len(asked):
            return 0
        one, later = asked[number], {key for two in asked[number + 1 :] for key in two.keys[: two.most_hits]}
        hits = next((depth for depth, key in enumerate(one.keys[: one.most_hits]) if key not in kept), one.most_hits)
        others = (kept - frozenset(one.keys)) & later
        kept_at_most = min(usable - one.num_blocks, len(others))
        choices = itertools.combinations(sorted(others, key=str), kept_at_most)
        return hits + max(best(number + 1, frozenset(choice) | frozenset(one.keys)) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(traffic(), st.integers(2, 14))
def test_no_choice_of_blocks_to_keep_has_more_hits_than_belady(records: list[Record], usable: int) -> None:
    few = [record for record in records if wanted([record], usable)][:8]
    assert sum(compiled_hits(few, usable, "belady")[0]) == best_hits(wanted(few, usable), usable)


def objects() -> list[int]:
    """A loop over 700 objects between skewed draws of 300 others."""
    state, found = 7, []
    for number in range(4000):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draw = (state >> 33) / 2**31
        found.append(number % 700 + 10_000 if number % 3 == 0 else int(300 * draw**3))
    return found


def test_on_single_objects_policies_hit_as_in_libcachesim() -> None:
    keys = np.array(objects(), np.uint64)
    requests = np.zeros(len(keys), REQUEST)
    requests["first_key"], requests["serial"] = np.arange(len(keys)), NO_SERIAL
    for name in ("known_keys", "prompt_blocks", "most_hits", "full_blocks", "num_blocks"):
        requests[name] = 1
    for evict, hits in OBJECTS.items():
        for size, expected in zip((20, 50, 100, 200, 400), hits, strict=True):
            pool = OneByOnePool(size, "vllm", evict, requests, 1)
            assert pool.run(keys, requests.copy()).sum() == expected, (evict, size)
