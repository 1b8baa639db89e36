"""KV cache offloading to host memory: results by hand, and laws of conservation."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.deployment import Deployment
from sim.engine.simulatedrequest import NO_OUTCOME
from sim.engine.simulation import Simulation, simulate
from sim.engine.tiers import traffic_of
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.engine.test_compiled import load
from tests.sim.fleets import COSTS
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

CONFIG = EngineConfig(block_size=4, num_gpu_blocks=6, max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False)
LINK: dict[str, Any] = {"kv_bytes_per_token": 1_000_000, "host_gb_per_s": 1.0, "host_latency_ms": 2.0}
"""A millisecond a token, two a transfer."""


def chained(*requests: tuple[float, list[int], int]) -> Arrivals:
    """Arrivals of these times, blocks, and further prompt tokens; each has one token of output."""
    records = [
        Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=arrival_ms,
            prompt_tokens=4 * len(blocks) + more,
            output_tokens=1,
            block_hashes=[BlockHash(block) for block in blocks],
        )
        for number, (arrival_ms, blocks, more) in enumerate(requests)
    ]
    return plan_arrivals(Meta(block_size=4), records, 4)


def run(arrivals: Arrivals, config: EngineConfig = CONFIG, **deployed: Any) -> Simulation:
    return simulate(arrivals, config, make_model(COSTS, config), deployment=Deployment(**LINK, **deployed))


def cached(run: Simulation) -> list[int]:
    return [request.cached_tokens for request in run.requests]


AGAIN = ((0.0, [1, 2, 3, 4], 0), (100.0, [5, 6, 7, 8], 0), (200.0, [1, 2, 3, 4], 4))
"""The second displaces three of the first's four blocks, which the third requests."""


def test_loading_request_waits_while_running_requests_decode() -> None:
    state = run(chained(*AGAIN), host_blocks=8)
    assert cached(state) == [0, 0, 16]
    # Entry at 201 ms; 2 ms and 12 tokens on the link; a step of 4 ms and 4 tokens.
    assert [request.ttft_ms for request in state.requests] == pytest.approx([6.6, 6.6, 1.0 + 14.0 + 4.4])
    traffic = traffic_of([state.engine])
    assert (traffic.loads, traffic.loaded_tokens, traffic.stored_blocks, traffic.host_blocks) == (1, 12, 9, 8)


def test_last_block_is_evicted_first() -> None:
    """The first's third and fourth blocks are evicted on the host; the pool has the root."""
    state = run(chained(*AGAIN), host_blocks=6)
    assert cached(state) == [0, 0, 8]


def test_resident_blocks_are_of_current_lives() -> None:
    dead, alive = run(chained(*AGAIN), host_blocks=8), run(chained(*AGAIN[:1]), host_blocks=8)
    traffic = traffic_of([dead.engine, alive.engine], [alive.engine])
    assert (traffic.loads, traffic.stored_blocks, traffic.host_blocks) == (1, 13, 4)


def test_free_links_and_large_host_equal_an_unlimited_pool() -> None:
    rng = np.random.default_rng(1)
    chains = [[int(root), *(10 * int(root) + step for step in range(1, 4))] for root in rng.integers(1, 9, 60)]
    arrivals = chained(*((50.0 * number, chain, 1) for number, chain in enumerate(chains)))
    free: dict[str, Any] = {"kv_bytes_per_token": 1, "host_gb_per_s": 1e9, "host_latency_ms": 0.0}
    small = simulate(arrivals, CONFIG, make_model(COSTS, CONFIG), deployment=Deployment(**free, host_blocks=500))
    large = EngineConfig(block_size=4, num_gpu_blocks=500, max_num_seqs=8, async_scheduling=False)
    assert cached(small) == cached(simulate(arrivals, large, make_model(COSTS, large)))


def shared_load(seed: int, requests: int) -> Arrivals:
    """Conversations on a small pool, some at once, some aborted."""
    return plan_arrivals(Meta(block_size=4), load(random.Random(seed), requests, 12.0), 4)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), host=st.sampled_from([16, 40, 400]), ahead=st.booleans())
def test_host_memory_never_exceeds_an_unlimited_cache(*, seed: int, host: int, ahead: bool) -> None:
    config = EngineConfig(
        block_size=4, num_gpu_blocks=40, max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=ahead
    )
    arrivals = shared_load(seed, 40)
    deployed = Deployment(**LINK, host_blocks=host)
    run = simulate(arrivals, config, make_model(COSTS, config), deployment=deployed)
    assert all(request.outcome != NO_OUTCOME for request in run.requests)
    offloading, traffic = run.engine.scheduler.offloading, traffic_of([run.engine])
    assert offloading is not None
    assert offloading.cache.pool.num_free == config.usable_blocks
    assert traffic.host_blocks <= host
    tier = offloading.host
    in_line, block = 0, tier._ends.newer
    while block is not tier._ends:
        assert tier.blocks[block.key] is block
        in_line, block = in_line + 1, block.newer
    assert in_line == len(tier.blocks)
    assert traffic.host_blocks + traffic.host_evicted == traffic.stored_blocks
    assert not offloading.loading
    assert_hits_are_possible(arrivals, run)


def assert_hits_are_possible(arrivals: Arrivals, run: Simulation) -> None:
    """A hit is of blocks that a request before it had, in its prompt or in its output."""
    entry_ms = np.array([request.entry_ms for request in run.requests])
    order = np.argsort(np.nan_to_num(entry_ms, nan=np.inf), kind="stable").tolist()
    seen: set[int] = set()
    starts = np.cumsum(arrivals.hashed_blocks) - arrivals.hashed_blocks
    for position in order:
        chain = arrivals.hashes[starts[position] : starts[position] + arrivals.hashed_blocks[position]].tolist()
        hit = run.requests[position].cached_tokens // 4
        assert hit <= len(arrivals.hashes)
        if hit > 0 and run.requests[position].preemptions == 0:
            assert set(chain[:hit]) <= seen
        seen |= set(chain)


@pytest.mark.parametrize(
    ("deployed", "message"),
    [
        ({"host_blocks": 5}, "--kv-bytes-per-token: not set; expected the KV cache's bytes of a token"),
    ],
)
def test_impossible_deployment_prints_a_single_line(deployed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        Deployment(**deployed)
    assert str(refused.value).startswith(message)


def test_too_small_host_memory_is_rejected() -> None:
    with pytest.raises(InputError, match="--host-blocks: 3 blocks; expected 5 or more, as many as the longest prompt"):
        Deployment(**LINK, host_blocks=3).require_host_capacity(chained(*AGAIN), 4)
