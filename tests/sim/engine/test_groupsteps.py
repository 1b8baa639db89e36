"""The step loop with several KV groups is the readable scheduler's.

The loop runs here as Python: its source is what is compiled. One test, among vLLM's, compiles it.
"""

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from sim.engine.deployment import Deployment
from sim.engine.simstate import build_state, loop_of
from sim.kernels import groupsteps, loop
from sim.kernels.layout import SimState
from sim.kernels.loop import run_state
from sim.latency.modelfile import Model, make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.engine.test_compiled import NOISE, STEP, load
from tests.sim.oracles.readable_loop import in_python, run_readable
from tests.sim.vllm.test_hybrid_oracle import make_hybrid
from tests.sim.vllm.test_vllm_oracle import our_config
from tracefile import InputError, Meta

RUN = in_python(loop.run, groupsteps.REPLACED, groupsteps.__name__)


def case(seed: int, requests: int, groups: str | None = None) -> tuple[Arrivals, EngineConfig, Model]:
    """A load on an engine of ``groups``, both at random."""
    config, rng = our_config(make_hybrid(seed)), random.Random(seed)
    if groups is not None:
        config = replace(config, kv_groups=groups, block_size=4, num_gpu_blocks=100, enable_prefix_caching=True)
    records = load(rng, requests, rng.choice([2.0, 20.0]))
    arrivals = plan_arrivals(Meta(block_size=4), records, config.block_size, replay_sessions=True)
    costs = {**STEP, "frontend_base_ms": 1.5, "frontend_ms_per_prompt_token": 0.02}
    placements = get_args(FrontendPlacement)
    return arrivals, config, make_model(costs, config, NOISE, placements[seed % len(placements)])


def assert_equal(ours: SimState, theirs: SimState) -> None:
    assert (ours.runs["outcome"] == theirs.runs["outcome"]).all()
    for name in ("arrival_ms", "ttft_ms", "e2e_ms", "admitted_ms"):
        np.testing.assert_allclose(ours.runs[name], theirs.runs[name], rtol=1e-9)
    for name in ("cached_tokens", "preemptions"):
        assert (ours.scheduler.requests[name] == theirs.scheduler.requests[name]).all()
    assert (ours.scheduler.stats == theirs.scheduler.stats).all()
    assert ours.clock["num_steps"] == theirs.clock["num_steps"]
    assert ours.scheduler.pool.counts["evicted_blocks"] == theirs.scheduler.pool.counts["evicted_blocks"]


@pytest.mark.parametrize("groups", ["full:4+window(16):4*2+retain=none", "full:8+mamba2:8+match=4", None])
def test_steps_are_the_readable_schedulers(groups: str | None) -> None:
    arrivals, config, model = case(3, 12, groups)
    ours = run_state(build_state(arrivals, config, model, 3), RUN)
    assert_equal(ours, run_readable(build_state(arrivals, config, model, 3), arrivals, config))


def test_what_groups_do_not_go_with_is_one_line() -> None:
    _, config, _ = case(8, 2)
    with pytest.raises(InputError, match="--kv-groups: not simulated with memory behind"):
        Deployment(host_blocks=9, kv_bytes_per_token=8).check(config)


@pytest.mark.vllm  # for its compilation
@pytest.mark.timeout(900)
def test_the_compiled_loop_is_the_readable_one() -> None:
    preemptions = hits = 0
    for seed in range(200):
        arrivals, config, model = case(seed, 40)
        ours = run_state(build_state(arrivals, config, model, 3), loop_of(config))
        assert_equal(ours, run_readable(build_state(arrivals, config, model, 3), arrivals, config))
        preemptions += int(ours.clock["preemptions"][0])
        hits += int(ours.scheduler.stats["hit_tokens"][0])
    assert preemptions > 20
    assert hits > 5_000
