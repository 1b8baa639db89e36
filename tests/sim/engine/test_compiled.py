"""The step loop against the plain one: the same bits, whatever the load and the settings."""

import random
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.simulation import simulate as run_engine
from sim.latency.modelfile import make_model
from sim.latency.noise import LEVELS, Noise
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import SingleGroupCache
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.arrival import Arrival, objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import Simulation, columns, simulate
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

STEP = {
    "t0_ms": 4.3,
    "per_prefill_token_ms": 0.13,
    "per_attention_token2_ms": 1e-3,
    "per_decode_ms": 0.99,
    "per_kv_token_ms": 3e-3,
    "per_repeated_kv_token_ms": 1e-3,
    "per_prefill_chunk_ms": 0.7,
    "prefill_step_ms": 0.31,
    "rested_step_ms": 1.9,
    "per_rested_depth_ms": 0.02,
}
NOISE = Noise(
    step_ms=(6.0, 16.0, 40.0),
    step_log_ratio=tuple(tuple(0.03 * (position - 7 + row) for position in range(len(LEVELS))) for row in range(3)),
    autocorrelated_share=0.4,
    correlation_time_ms=100.0,
    frontend_log_ratio=tuple(0.05 * (position - 7) for position in range(len(LEVELS))),
)


def load(rng: random.Random, requests: int, spacing_ms: float) -> list[Record]:
    """Prompts that begin alike, conversations, clients that leave, errors, and now and then one that is too long."""
    records: list[Record] = []
    for number in range(requests):
        prompt, output = rng.choice([1, 4, 8, rng.randrange(1, 60)]), rng.randrange(1, 40)
        if rng.random() < 0.03:
            prompt = 700
        blocks = (prompt + output - 1) // 4
        chain = [BlockHash(rng.getrandbits(64)) for _ in range(blocks)]
        if records and rng.random() < 0.6:
            earlier = rng.choice(records)
            shared = (earlier.block_hashes or []) + (earlier.output_block_hashes or [])
            retained = rng.randrange(min(len(shared), blocks) + 1)
            chain = shared[:retained] + chain[retained:]
        record = Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=round(rng.uniform(0, requests * spacing_ms), rng.choice([0, 3])),
            prompt_tokens=prompt,
            output_tokens=output,
            block_hashes=chain[: prompt // 4],
            output_block_hashes=chain[prompt // 4 :] if rng.random() < 0.8 else None,
        )
        if rng.random() < 0.15:
            record.status, record.e2e_ms = "client_abort", rng.uniform(0, 400)
            record.max_tokens = rng.randrange(1, 60)
        elif rng.random() < 0.05:
            record.status, record.http_status, record.e2e_ms = "error", 429, 1.5
        elif records and rng.random() < 0.3:
            record.parent_id, record.think_ms = rng.choice(records).request_id, rng.choice([0.0, rng.uniform(0, 100)])
        records.append(record)
    return records


def outcome(simulation: Simulation) -> list[object]:
    runs = [
        (
            request_run.outcome,
            request_run.arrival_ms,
            request_run.entry_ms,
            request_run.admitted_ms,
            list(request_run.token_steps),
            request_run.ttft_ms,
            request_run.itl_ms.tolist(),
            request_run.e2e_ms,
            request_run.request
            and (request_run.request.cached_tokens, request_run.request.preemptions, request_run.request.num_generated),
        )
        for request_run in simulation.runs
    ]
    steps = simulation.timeline
    rows = [tuple(map(float, row)) for row in steps.rows]
    return [runs, simulation.prefix, simulation.preemptions, steps.starts_ms, steps.ends_ms, rows]


def plan(records: list[Record], block_size: int) -> list[Arrival]:
    return objects(plan_arrivals(Meta(block_size=4), records, block_size, replay_sessions=True))


CONFIGS = st.builds(
    EngineConfig,
    num_gpu_blocks=st.sampled_from([20, 27, 40, 101, 1000]),
    block_size=st.sampled_from([4, 8, 16]),
    max_num_seqs=st.sampled_from([1, 3, 6, 64]),
    max_num_batched_tokens=st.sampled_from([3, 16, 32, 1024]),
    max_model_len=st.sampled_from([None, 70]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    async_scheduling=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(
    load_seed=st.integers(0, 10**6),
    requests=st.integers(1, 40),
    spacing_ms=st.sampled_from([0.0, 5.0, 30.0, 200.0]),
    config=CONFIGS,
    placement=st.sampled_from(get_args(FrontendPlacement)),
    seed=st.sampled_from([None, 7]),
)
def test_compiled_engine_is_bit_identical(  # noqa: PLR0917 - one for each strategy
    load_seed: int,
    requests: int,
    spacing_ms: float,
    config: EngineConfig,
    placement: FrontendPlacement,
    seed: int | None,
) -> None:
    frontend = {"frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01, "delivery_ms_per_prompt_token": 0.07}
    model = make_model({**STEP, **frontend}, config, NOISE, placement)
    arrivals = plan(load(random.Random(load_seed), requests, spacing_ms), config.block_size)
    plain = Engine(arrivals, config, model, seed=seed).run()
    assert all(request_run.outcome for request_run in plain.runs)
    assert outcome(simulate(arrivals, config, model, seed=seed)) == outcome(plain)


def test_unchained_hashes_are_rejected() -> None:
    config = EngineConfig(num_gpu_blocks=40, block_size=4)
    model = make_model({**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config)
    # The second cuts the first's chain before 2, where the third then looks it up at a different depth.
    records = [
        Record(
            request_id=RequestId(name),
            arrival_ms=1e4 * at,
            prompt_tokens=9,
            output_tokens=2,
            block_hashes=[BlockHash(key) for key in chain],
        )
        for at, (name, chain) in enumerate({"a": (1, 2), "b": (1, 3), "c": (2, 4)}.items())
    ]
    with pytest.raises(InputError, match="block_hashes: a hash occurs at two depths"):
        simulate(plan(records, 4), config, model)


def test_memory_follows_branches() -> None:
    # Four conversations, in blocks of 64 tokens and of a 16th: outputs are then long enough to fill a block.
    used = []
    for parts in (1, 16):
        records = [
            Record(
                request_id=RequestId(f"{session}.{turn}"),
                arrival_ms=1e4 * turn + session,
                prompt_tokens=640 * (turn + 1) + 5,
                output_tokens=20,
                block_hashes=[BlockHash(1 + 10**6 * session + at) for at in range(10 * parts * (turn + 1))],
            )
            for turn in range(5)
            for session in range(4)
        ]
        config = EngineConfig(num_gpu_blocks=300 * parts, block_size=64 // parts)
        model = make_model({**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config)
        arrivals = objects(plan_arrivals(Meta(block_size=64 // parts), records, 64 // parts))
        cache = run_engine(columns(arrivals), config, model).engine.scheduler.cache
        assert isinstance(cache, SingleGroupCache)
        free, copy = 0, cache.pool._queue.after
        while copy is not cache.pool._queue:
            free, copy = free + 1, copy.after
        used.append(free)
    conversations, outputs = 4, 20
    assert used == [conversations, conversations + outputs]


@pytest.mark.parametrize(("usable", "hit_blocks"), [(1_000, 12_878), (10_000, 61_238), (50_000, 102_226)])
def test_known_hit_counts(mooncake: Path, usable: int, hit_blocks: int) -> None:
    """The Mooncake conversation trace, so slowly that requests never overlap: exactly the hits of ``sim pool``."""
    meta, records = load_trace(mooncake)
    apart = [msgspec.structs.replace(record, arrival_ms=1e7 * position) for position, record in enumerate(records)]
    config = EngineConfig(num_gpu_blocks=usable + 1, block_size=512, max_num_batched_tokens=8192)
    model = make_model({**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config)
    simulation = simulate(objects(plan_arrivals(meta, apart, 512)), config, model)
    assert simulation.prefix.hit_tokens == 512 * hit_blocks


def test_shared_core_precision_far_from_zero() -> None:
    """Days after t = 0 a rest of rounding no longer moves the clock: it must end, not be worked on for ever."""
    day_ms = 100 * 24 * 3.6e6
    records = [
        Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=day_ms,
            prompt_tokens=4 + number,
            output_tokens=2,
            block_hashes=[BlockHash(1 + 100 * number + block) for block in range(1 + number // 4)],
        )
        for number in range(40)
    ]
    config = EngineConfig(block_size=4, num_gpu_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    model = make_model(
        {**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.013}, config, placement="shared_core"
    )
    arrivals = plan_arrivals(Meta(block_size=4), records, config.block_size)
    run = run_engine(arrivals, config, model)
    assert np.isfinite([request.ttft_ms for request in run.requests]).all()
    each = objects(arrivals)
    assert outcome(simulate(each, config, model)) == outcome(Engine(each, config, model).run())
