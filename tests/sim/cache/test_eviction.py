"""Policies of eviction: the compiled pool against one that searches lists, and Belady's against every choice."""

import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cache.sequential_pool import REQUEST, Requests, SequentialPool, lay_out, read_requests
from sim.engine.simstate import build_state
from sim.kernels.blocks import CACHED, NO_SERIAL
from sim.kernels.layout import Pool
from sim.kernels.loop import run_state
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.vllm.eviction import LEVELS, POLICIES, parse_evict
from sim.workload.arrivals import plan_arrivals
from sim.workload.chain import Chains, engine_chains, hashed_batches
from tests.sim.cache.test_segments import BLOCK, traffic
from tests.sim.oracles import slow_objects
from tests.sim.oracles.slow_eviction import SlowPool, Wanted
from tracefile import BlockHash, InputError, Meta, Record, RequestId
from tracefile.files.reading import open_trace
from tracefile.records.batches import RecordBatch

OBJECTS = {  # hits of libcachesim 0.3.5 by cache size on ``objects()``
    "ttl:after=1h": [596, 888, 1184, 1590, 2011],  # of its LRU: no object is unused for so long
    "lfu": [885, 1273, 1600, 1907, 2210],
    "belady": [1322, 1744, 2054, 2314, 2514],
}
CHOICES = [*POLICIES[1:], "ttl:after=20ms"]


def arrival_ms(number: int) -> float:
    """Time of a request: sessions' files have times that go back, too."""
    return 7.0 * number + (500.0 * (number // 5 % 3))


def wanted(records: Sequence[Record], usable: int) -> list[Wanted]:
    """Return the requests that fit, as the slow pool has them."""
    chains, found = Chains(Meta(block_size=BLOCK)), []
    for number, record in enumerate(records):
        keys, known = chains.whole(record), len(chains.known(record))
        tokens = (record.prompt_tokens or 0) + max((record.output_tokens or 0) - 1, 0)
        most = min(((record.prompt_tokens or 1) - 1) // BLOCK, known)
        found.append(Wanted(keys, most, -(-tokens // BLOCK), known, arrival_ms(number)))
    return [one for one in found if one.num_blocks <= usable]


def compiled_hits(
    records: Sequence[Record], usable: int, evict: str, times_ms: Sequence[float] = ()
) -> tuple[list[int], int]:
    some = RecordBatch(list(records))
    part = lay_out(some, some.hashes(), Chains(Meta(block_size=BLOCK)))
    part.requests["arrival_ms"] = times_ms or [arrival_ms(number) for number in range(len(records))]
    pool = SequentialPool(part, usable, BLOCK, evict)
    return pool.run().tolist(), pool.evicted_blocks


@settings(max_examples=60, deadline=None)
@given(traffic(), st.integers(2, 60), st.sampled_from(CHOICES))
def test_every_policy_does_what_the_slow_pool_does(records: list[Record], usable: int, evict: str) -> None:
    asked = wanted(records, usable)
    slow = SlowPool(usable, evict, asked)
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


def test_belady_evicts_first_a_block_computed_again_before_its_lookup() -> None:
    """The third prompt, one full block, cannot hit it but caches it anew: the block behind it is worth more."""
    chains = [[2, 3], [5, 6], [2], [2, 3, 7]]
    records = [
        Record(
            request_id=RequestId(f"r{number}"), prompt_tokens=BLOCK * len(chain), block_hashes=[*map(BlockHash, chain)]
        )
        for number, chain in enumerate(chains)
    ]
    assert compiled_hits(records, 3, "belady") == ([0, 0, 0, 2], 3)
    assert best_hits(wanted(records, 3), 3) == 2


def objects() -> list[int]:
    """A loop over 700 objects between skewed draws of 300 others."""
    state, found = 7, []
    for number in range(4000):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draw = (state >> 33) / 2**31
        found.append(number % 700 + 10_000 if number % 3 == 0 else int(300 * draw**3))
    return found


def object_hits(keys: Sequence[int], size: int, evict: str) -> int:
    """Hits of requests of one block each, 2 ms apart."""
    requests = np.zeros(len(keys), REQUEST)
    requests["first_key"], requests["serial"] = np.arange(len(keys)), NO_SERIAL
    for name in ("known_keys", "prompt_blocks", "most_hits", "full_blocks", "num_blocks"):
        requests[name] = 1
    requests["arrival_ms"] = 2.0 * np.arange(len(keys))
    nothing = np.zeros(len(keys), np.int64)
    whole = Requests(nothing, nothing, nothing, np.array(keys, np.uint64), requests)
    return int(SequentialPool(whole, size, 1, evict).run().sum())


def test_on_single_objects_policies_hit_as_in_libcachesim() -> None:
    for evict, hits in OBJECTS.items():
        for size, expected in zip((20, 50, 100, 200, 400), hits, strict=True):
            assert object_hits(objects(), size, evict) == expected, (evict, size)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 11), max_size=80), st.integers(1, 9))
def test_on_single_objects_policies_hit_as_their_papers_say(keys: list[int], size: int) -> None:
    assert object_hits(keys, size, "slru") == slow_objects.slru(keys, size)
    assert object_hits(keys, size, "lfu") == slow_objects.lfu(keys, size)
    assert object_hits(keys, size, "ttl:after=8ms") == slow_objects.ttl(keys, size, 8.0, 2.0)


def test_segmented_lru_by_hand() -> None:
    # Five objects, four of them protected. 1 and 2 are hit and so outlive 3 to 5; 6 and 7 take the places of 3 and 4.
    assert object_hits([1, 2, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 5], 5, "slru") == 4
    # The fifth hit object is one too many: 1 goes back to the probationary segment, and is the first to be lost to 6.
    assert object_hits([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 1], 5, "slru") == 5
    assert object_hits([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 2], 5, "slru") == 6


RUNNING = tuple(one for one in CHOICES if one != "belady" and "ttl" not in one)


def pool_after(records: Sequence[Record], config: EngineConfig) -> tuple[Pool, list[int]]:
    """Return the pool after a simulated run, and each request's cached tokens."""
    model = make_model({"t0_ms": 4.3, "per_decode_ms": 0.9, "frontend_base_ms": 1.7}, config)
    state = run_state(build_state(plan_arrivals(Meta(block_size=BLOCK), list(records), BLOCK), config, model))
    return state.scheduler.pool, state.scheduler.requests["cached_tokens"][:-1].tolist()


def check_blocks(pool: Pool) -> None:
    """Raise AssertionError unless all blocks are idle, counted, queued, and cached behind those before them."""
    rows = pool.blocks[: int(pool.counts["num_copies"][0])]
    free, row = set(), int(pool.counts["free_copy"][0])
    while row:
        free.add(row)
        row = int(rows[row]["after"])
    levels = LEVELS.get(int(pool.settings["evict"][0]), 1)
    cached = [row for row in range(levels, len(rows)) if row not in free and rows[row]["state"] == CACHED]
    below = Counter(int(rows[row]["parent"]) for row in cached)
    assert all(int(rows[row]["children"]) == below[row] and not rows[row]["references"] for row in cached)
    assert set(below) - {0} <= set(cached), "a block without the one before it"
    queued = [row for row in range(levels, len(rows)) if row not in free]
    assert rows["hits"][:levels].sum() == len(queued)
    assert len(cached) + int(pool.counts["num_unhashed"][0]) == int(pool.counts["num_free"][0])
    assert pool.counts["num_free"][0] == pool.settings["usable_blocks"][0]


def test_a_run_of_requests_that_never_meet_hits_as_one_at_a_time() -> None:
    rng = random.Random(3)
    records: list[Record] = []
    for number in range(60):
        prompt, earlier = rng.randrange(1, 12) * BLOCK + 1, rng.choice(records).block_hashes if records else None
        chain = [*(earlier or ())][: rng.randrange(12)][: prompt // BLOCK]
        chain += [BlockHash(100 * number + depth + 1) for depth in range(len(chain), prompt // BLOCK)]
        records.append(
            Record(
                request_id=RequestId(f"r{number}"),
                arrival_ms=1e6 * number,
                prompt_tokens=prompt,
                output_tokens=rng.randrange(1, 9),
                block_hashes=chain,
            )
        )
    for evict in RUNNING:
        config = EngineConfig(num_gpu_blocks=31, block_size=BLOCK, evict=evict)
        pool, cached = pool_after(records, config)
        check_blocks(pool)
        hits, evicted = compiled_hits(records, 30, evict, [record.arrival_ms or 0.0 for record in records])
        assert cached == [BLOCK * hit for hit in hits], evict
        assert int(pool.counts["evicted_blocks"][0]) == evicted, evict


@settings(max_examples=40, deadline=None)
@given(traffic(), st.integers(14, 40), st.sampled_from(RUNNING))
def test_requests_at_once_leave_whole_chains_behind(records: list[Record], usable: int, evict: str) -> None:
    timed = [msgspec.structs.replace(one, arrival_ms=2.0 * place) for place, one in enumerate(records)]
    config = EngineConfig(num_gpu_blocks=usable + 1, block_size=BLOCK, max_num_batched_tokens=32, evict=evict)
    check_blocks(pool_after(timed, config)[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arc", "'arc'; expected one of vllm, lfu, slru, ttl, belady"),
        ("lfu:after=3s", "'lfu:after=3s': setting 'after'; expected lfu alone, which has none"),
        ("ttl:after=3", "ttl:after=3"),
        ("ttl:limit=3s", "setting 'limit'; expected after"),
    ],
)
def test_a_policy_that_there_is_not_is_named(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        parse_evict(text)


def test_an_engine_cannot_know_the_future() -> None:
    with pytest.raises(InputError, match="evict: belady: it has to know the order of requests"):
        EngineConfig(num_gpu_blocks=9, evict="belady")


ROOT = Path(__file__).parents[3]
CAPTURES, SHIPPED = ROOT / "data/captures", ROOT / "loadgen/datasets/workloads"
SHIPPED_NAMES = ["agentic-coding.jsonl.zst", "office-work.jsonl.zst"]


@pytest.mark.parametrize(
    "trace", ["128x2/session-fast.jsonl.zst", "256x4/session-fast.jsonl.zst", "conversation", *SHIPPED_NAMES]
)
def test_no_policy_hits_more_than_the_bound_at_any_size(trace: str, tmp_path: Path) -> None:
    path, folder = CAPTURES / trace, os.environ.get("KVTAPE_DATA")
    if trace == "conversation":
        if not folder:
            pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
        path = Path(folder) / "mooncake" / "conversation_trace.jsonl"
    if trace in SHIPPED_NAMES:
        path = tmp_path / "four.jsonl"
        with zstandard.open(SHIPPED / trace, "rt") as lines:
            path.write_text("".join(itertools.islice(lines, 4)))
    with open_trace(path) as reader:
        chains = engine_chains(reader.meta, 512 if trace in SHIPPED_NAMES else None)
        requests = read_requests(hashed_batches(reader), chains)
    for factor in (1, 2, 4, 16, 64):
        usable = factor * int(requests.requests["num_blocks"].max())
        hits = {
            policy: int(SequentialPool(requests, usable, chains.block_size, policy).run().sum()) for policy in POLICIES
        }
        assert hits["belady"] == max(hits.values()) > 0, usable
