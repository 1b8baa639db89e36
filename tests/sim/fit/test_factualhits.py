"""Hits as a capture reports them: as many as reported, on blocks that other requests hold where contents agree."""

import numpy as np

from sim.engine.simstate import build_state
from sim.fit.factualhits import factual_pool, with_factual_hits
from sim.kernels.loop import run_state
from sim.latency.modelfile import make_model
from sim.latency.terms import KV_TOKENS, REPEATED_KV_TOKENS
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrival, plan_arrivals
from tests.sim.oracles.integrity import check_pool
from tracefile import BlockHash, Meta, Record, RequestId

SIZE = 16
CHAIN = [BlockHash(number) for number in (101, 102, 103, 104)]


def asked(name: str, arrival_ms: float, cached: int) -> Record:
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        stream=True,
        prompt_tokens=4 * SIZE + 1,
        output_tokens=8,
        max_tokens=8,
        cached_tokens=cached,
        block_hashes=list(CHAIN),
    )


def arrival(name: str, cached: int) -> Arrival:
    return Arrival(asked(name, 0.0, cached), "runs", 4 * SIZE + 1, 8, [int(block) for block in CHAIN], 0.0)


def test_as_many_blocks_are_hit_as_were_reported() -> None:
    own, pool = factual_pool([arrival("a", 0), arrival("b", 48), arrival("c", 32)], SIZE, [0, 48, 32])
    assert [len(pool.lookup(one.hashes, 4)) for one in own] == [0, 3, 2]
    assert len({key for one in own for key in one.hashes}) == 12  # nothing is found by another request's key


def test_held_blocks_of_the_same_content_are_hit_and_others_where_none_is_held() -> None:
    own, pool = factual_pool([arrival("a", 0), arrival("b", 48), arrival("c", 32)], SIZE, [0, 48, 32])
    computed = pool.take(4)
    pool.insert(computed, own[0].hashes)
    hits = pool.lookup(own[1].hashes, 4)
    assert hits == computed[:3]
    pool.hold(hits)
    assert pool.num_repeated == 3
    pool.release(computed)
    assert pool.num_repeated == 0
    again = pool.lookup(own[2].hashes, 4)
    assert again == computed[:2]  # the second request still holds them
    pool.release(hits)
    idle = pool.lookup(own[2].hashes, 4)
    pool.hold(idle)
    assert pool.num_repeated == 0
    check_pool(pool, [idle])


def test_the_compiled_engine_shares_reported_hits_too() -> None:
    """Two requests at once that hit three blocks each: one of the two reads is repeated."""
    records = [asked("a", 0.0, 48), asked("b", 0.0, 48)]
    columns = plan_arrivals(Meta(block_size=SIZE), records, SIZE, path="t")
    config = EngineConfig(num_gpu_blocks=100, block_size=SIZE, async_scheduling=False)
    arrivals, roomy = with_factual_hits(columns, config, np.array([48, 48]))
    state = run_state(build_state(arrivals, roomy, make_model({"t0_ms": 1.0}, roomy)))
    rows = state.timeline.rows[: int(state.clock["num_steps"][0])]
    decoding = rows[rows[:, KV_TOKENS] > 0]
    assert set(decoding[:, REPEATED_KV_TOKENS].tolist()) == {48.0}
