"""The online hit curve against a plain LRU, one size at a time, and against `sim curve`."""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.accesses import Accesses
from measure.cache.hitcurve import HitCurve, hit_curve
from sim.cache.sampledcurve import Sampling, sample_curve
from sim.workload.chain import Chains
from tap.admin.cachecurve import GROUP, SIZES, CacheCurve, RecencyStack
from tap.admin.state import LiveState
from tap.admin.view import hit_curve_view
from tap.ipc.exchange import AdminSetup, ServiceStats
from tap.ipc.feed import SeenRecord
from tests.sim.cache.packed import in_order
from tracefile.files.reading import load_trace
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

BLOCK = 4
CAPTURES = Path(__file__).parents[3] / "data" / "captures" / "128x2"
Requests = list[tuple[list[int], int]]
"""Chains of block hashes, each with its prompt's tokens."""


def lru_hits(requests: Requests, size: int) -> int:
    """Blocks hit in one LRU cache: leading blocks at arrival, then all touched leaf to root."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks, tokens in requests:
        for block in blocks[: (tokens - 1) // BLOCK]:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits


def conversations(seed: int, sessions: int, prefixes: int, prefix_blocks: int, turn_blocks: int) -> Requests:
    """Sessions that take turns, each on one of a few long prefixes; hashes are uniform, as ours are."""
    draw = random.Random(seed)
    heads = [[draw.getrandbits(64) for _ in range(prefix_blocks)] for _ in range(prefixes)]
    histories = [list(draw.choice(heads)) for _ in range(sessions)]
    requests: Requests = []
    for _ in range(sessions * 3):
        history = draw.choice(histories)
        history += [draw.getrandbits(64) for _ in range(draw.randint(1, turn_blocks))]
        requests.append((list(history), len(history) * BLOCK + draw.randint(0, BLOCK - 1)))
    return requests


def sim_curve(requests: Requests) -> HitCurve:
    """The same requests through `sim curve`, which answers to the published counts of a real trace."""
    numbers: dict[int, int] = {}
    flat = [numbers.setdefault(block, len(numbers)) for blocks, _ in requests for block in blocks]
    starts = np.cumsum([0, *(len(blocks) for blocks, _ in requests)])
    prompts = np.array([tokens for _, tokens in requests])
    arrival_ms = np.arange(len(requests), dtype=np.float64)
    return hit_curve(
        Accesses(*in_order(flat, starts), (prompts - 1) // BLOCK, len(numbers), BLOCK, prompts, arrival_ms)
    )


def curve_of(requests: Requests, **parts: float) -> list[float]:
    curve = CacheCurve(BLOCK, **parts)  # type: ignore[arg-type]
    for blocks, tokens in requests:
        curve.take(blocks, tokens, None, 0.0)
    curve.check_integrity()
    return curve.recent(0.0).up_to_size()


def sizes_up_to(limit: int) -> list[tuple[int, int]]:
    return [(place, size) for place, size in enumerate(SIZES) if size <= limit]


def test_a_prefix_hits_from_the_size_that_holds_what_came_between() -> None:
    """a b | c | a b d: block a was touched last but for c, b before it; d is new. The last token is always computed."""
    requests: Requests = [([1, 2], 2 * BLOCK + 1), ([3], BLOCK + 1), ([1, 2, 4], 3 * BLOCK)]
    hits = curve_of(requests, rate=1.0)
    assert hits[:4] == [0.0, 1.0, 2.0, 2.0]  # sizes 1, 2, 3, 4: a is second of c a b, b third
    whole_prompt_again: Requests = [([1, 2], 2 * BLOCK), ([1, 2], 2 * BLOCK)]
    assert curve_of(whole_prompt_again, rate=1.0)[-1] == 1.0  # of two full blocks, one: rule 6


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 40))
def test_every_size_is_exactly_an_lru_cache_of_that_size_at_rate_1(seed: int, sessions: int, exact: int) -> None:
    """However the blocks are split between the exact part and a sample that holds them all."""
    requests = conversations(seed, sessions, 2, 5, 4)
    hits = curve_of(requests, rate=1.0, exact_blocks=exact)
    for place, size in sizes_up_to(64):
        assert hits[place] == lru_hits(requests, size), f"size {size}"


def test_it_is_exactly_sim_curve_at_rate_1() -> None:
    requests = conversations(3, 150, 4, 60, 12)
    known = sim_curve(requests)
    for exact in (0, 1_000, 100_000):
        hits = curve_of(requests, rate=1.0, exact_blocks=exact)
        assert [hits[place] for place, _ in sizes_up_to(1 << 20)] == [
            known.hits_at(size) for _, size in sizes_up_to(1 << 20)
        ]


def turns_on_outputs(seed: int) -> list[tuple[list[int], int, list[int]]]:
    """Conversations whose outputs become prompts: a prompt's blocks, its tokens, the blocks that its output filled."""
    draw = random.Random(seed)
    histories: list[list[int]] = [[] for _ in range(40)]
    requests = []
    for _ in range(200):
        history = draw.choice(histories)
        prompt = [*history, *(draw.getrandbits(64) for _ in range(draw.randint(1, 5)))]
        output = [draw.getrandbits(64) for _ in range(draw.randint(0, 6))]
        requests.append((prompt, len(prompt) * BLOCK + draw.randint(0, BLOCK - 1), output))
        history[:] = prompt + output
    return requests


def test_blocks_of_outputs_count_as_in_both_curves_of_sim() -> None:
    requests = turns_on_outputs(7)
    live = CacheCurve(BLOCK, rate=1.0, exact_blocks=300)
    for prompt, tokens, output in requests:
        live.take(prompt, tokens, None, 0.0, output)
    live.check_integrity()
    hits, known = live.recent(0.0).up_to_size(), sim_curve([(prompt + out, tokens) for prompt, tokens, out in requests])
    records = [
        Record(
            request_id=RequestId(str(number)),
            prompt_tokens=tokens,
            output_tokens=BLOCK * len(output) + 1,
            block_hashes=[BlockHash(block) for block in prompt],
            output_block_hashes=[BlockHash(block) for block in output],
        )
        for number, (prompt, tokens, output) in enumerate(requests)
    ]
    sampled = sample_curve(records, Chains(Meta(block_size=BLOCK)), Sampling(rate=1.0, exact_blocks=300), also=SIZES)
    of_sample = dict(zip(sampled.sizes.tolist(), sampled.hit_blocks.tolist(), strict=True))
    for place, size in sizes_up_to(1 << 12):
        assert hits[place] == known.hits_at(size) == of_sample[size]
    # The next turn finds what the turn before computed; without outputs, only its prompt.
    assert (known.max_hit_blocks, sim_curve([turn[:2] for turn in requests]).max_hit_blocks) == (2_859, 2_385)


@pytest.mark.parametrize("capture", ["session-fast", "session-fast-small", "poisson-slow"])
def test_what_a_captured_engine_reports_is_not_above_its_curve(capture: str) -> None:
    meta, records = load_trace(CAPTURES / f"{capture}.jsonl.zst")
    state = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="t.jsonl", block_size=16))
    state.take(ServiceStats(upstreams=["http://engine"], workers=1, workers_up=1, engine=meta.engine), 0.0)
    for record in sorted(records, key=lambda record: record.end_ms() or 0.0):
        state.see(SeenRecord(*(getattr(record, name) for name in SeenRecord.__struct_fields__)), 0.0)
    view = hit_curve_view(state, 0.0)
    assert view.requests == len(records)
    assert view.measured_share is not None
    assert view.engine_share is not None
    assert 0.8 < view.measured_share <= view.engine_share <= view.hit_share[-1]


def test_the_exact_part_is_exact_and_the_sample_within_its_stated_error() -> None:
    """4 standard errors of the count, at sizes 4 standard errors of the depth to either side."""
    requests = conversations(11, 900, 3, 200, 10)
    exact, rate = 2_048, 1 / 8
    hits, known = curve_of(requests, exact_blocks=exact, rate=rate), sim_curve(requests)
    for place, size in sizes_up_to(exact):
        assert hits[place] == known.hits_at(size)
    at_exact = hits[SIZES.index(exact)]
    for place, size in sizes_up_to(1 << 14):
        if size <= exact:
            continue
        spread = 4 * math.sqrt((size - exact) / rate)
        low = known.hits_at(max(exact, math.floor(size - spread)))
        high = known.hits_at(math.ceil(size + spread))
        # Blocks return here up to 3 times below the exact part, all of one block together in or out of the sample.
        slack = 4 * math.sqrt(3 * max(high - at_exact, 1) * (1 - rate) / rate)
        assert low - slack <= hits[place] <= high + slack, f"size {size}"


def test_memory_is_bounded_and_what_is_too_deep_is_a_miss() -> None:
    requests = conversations(5, 40, 1, 4, 6)
    curve = CacheCurve(BLOCK, exact_blocks=8, sample_blocks=16, rate=1.0)
    for blocks, tokens in requests:
        curve.take(blocks, tokens, None, 0.0)
    curve.check_integrity()
    assert curve.deepest == 24
    hits = curve.recent(0.0).up_to_size()
    for place, size in sizes_up_to(16):
        assert hits[place] == lru_hits(requests, size)
    assert hits[-1] == lru_hits(requests, 16)  # the sample holds the exact part too: 16 blocks in all at rate 1


def test_what_the_engine_reported_is_kept_beside_it_and_old_minutes_are_forgotten() -> None:
    curve = CacheCurve(BLOCK, rate=1.0)
    curve.take([1, 2], 9, None, 0.0)
    curve.take([1, 2], 9, 8, 59.0)
    counts = curve.recent(59.0)
    assert (counts.requests, counts.prompt_tokens, counts.reported_tokens, counts.cached_tokens) == (2, 18, 9, 8)
    assert curve.take([1, 2, 3], 12, None, 20 * 60.0) == 2  # the blocks are remembered for as long as there is room
    assert curve.recent(20 * 60.0).requests == 1


class SlowStack:
    """The same order as a plain list."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks = capacity, list[int]()

    def touch(self, blocks: Sequence[int]) -> list[int]:
        evicted = []
        for block in blocks:
            if block in self.blocks:
                self.blocks.remove(block)
            self.blocks.insert(0, block)
            if len(self.blocks) > self.capacity:
                evicted.append(self.blocks.pop())
        return evicted


@given(st.integers(0, 12), st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=20))
def test_the_stack_is_a_list_with_the_last_touched_first(capacity: int, touches: list[list[int]]) -> None:
    stack, slow = RecencyStack(capacity), SlowStack(capacity)
    for blocks in touches:
        assert stack.touch(blocks) == slow.touch(blocks)
        stack.check_integrity()
        assert stack.depths(slow.blocks) == list(range(1, len(slow.blocks) + 1))


def test_the_stack_keeps_its_order_when_its_slots_run_out() -> None:
    stack, slow = RecencyStack(300), SlowStack(300)
    draw = random.Random(1)
    for _ in range(3 * GROUP):
        block = draw.randrange(400)
        assert stack.touch([block]) == slow.touch([block])
    stack.check_integrity()
    assert [stack.depths([block])[0] for block in slow.blocks] == list(range(1, 301))
