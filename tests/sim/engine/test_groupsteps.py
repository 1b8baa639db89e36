"""The step loop with several KV groups is the readable scheduler's."""

import random
from typing import get_args

import pytest

from sim.engine.deployment import Deployment
from sim.latency.modelfile import Model, make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from tests.sim.engine.test_compiled import NOISE, STEP, load, outcome
from tests.sim.oracles.arrival import Arrival, objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import simulate
from tests.sim.vllm.test_hybrid_oracle import make_hybrid
from tests.sim.vllm.test_vllm_oracle import our_config
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta


def case(seed: int, requests: int) -> tuple[list[Arrival], EngineConfig, Model]:
    """A load on an engine of groups, both at random."""
    config, rng = our_config(make_hybrid(seed)), random.Random(seed)
    records = load(rng, requests, rng.choice([2.0, 20.0]))
    arrivals = plan_arrivals(Meta(block_size=4), records, config.block_size, replay_sessions=True)
    costs = {**STEP, "frontend_base_ms": 1.5, "frontend_ms_per_prompt_token": 0.02}
    placements = get_args(FrontendPlacement)
    return objects(arrivals), config, make_model(costs, config, NOISE, placements[seed % len(placements)])


def test_groups_equal_the_readable_scheduler() -> None:
    preemptions = hits = 0
    for seed in range(60):
        arrivals, config, model = case(seed, 40)
        ours = simulate(arrivals, config, model, seed=3)
        assert outcome(ours) == outcome(Engine(arrivals, config, model, seed=3).run()), f"workload {seed}"
        preemptions += ours.preemptions
        hits += ours.prefix.hit_tokens
    assert preemptions > 5
    assert hits > 1_000


def test_flags_that_exclude_kv_groups() -> None:
    _, config, _ = case(8, 2)
    with pytest.raises(InputError, match="--kv-groups: not simulated with --host-blocks"):
        Deployment(host_blocks=9, kv_bytes_per_token=8).check(config)
