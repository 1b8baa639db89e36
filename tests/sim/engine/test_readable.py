"""The step loop over the readable scheduler: one group as in the compiled engine, several groups in a what-if."""

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from sim.engine.readable import run_engine
from sim.engine.simstate import build_state
from sim.kernels import layout
from sim.latency.modelfile import make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from tests.sim.engine.test_compiled import NOISE, STEP, load
from tests.sim.oracles.simulation import columns
from tracefile import Meta

TIMES = ("arrival_ms", "ttft_ms", "e2e_ms", "admitted_ms")


@pytest.mark.parametrize("placement", get_args(FrontendPlacement))
@pytest.mark.parametrize("ahead", [False, True])
def test_one_group_is_the_compiled_engine(placement: FrontendPlacement, ahead: bool) -> None:
    records = load(random.Random(7), 30, 20.0)
    arrivals = columns(plan_arrivals(Meta(block_size=4), records, 4, replay_sessions=True).objects())
    costs = {**STEP, "frontend_base_ms": 1.5, "frontend_ms_per_prompt_token": 0.02}
    config = EngineConfig(num_gpu_blocks=40, block_size=4, max_num_seqs=6, async_scheduling=ahead)
    model = make_model(costs, config, NOISE, placement)
    one = replace(config, kv_groups="full:4")
    compiled = run_engine(build_state(arrivals, config, model, 3), arrivals, config)
    readable = run_engine(build_state(arrivals, one, model, 3), arrivals, one)
    assert (compiled.runs["outcome"] == readable.runs["outcome"]).all()
    for name in TIMES:
        np.testing.assert_allclose(readable.runs[name], compiled.runs[name], rtol=1e-9)
    ours, theirs = readable.scheduler.requests, compiled.scheduler.requests
    assert (ours["cached_tokens"] == theirs["cached_tokens"]).all()
    assert (ours["preemptions"] == theirs["preemptions"]).all()
    assert (readable.scheduler.stats == compiled.scheduler.stats).all()
    assert readable.clock["preemptions"] == compiled.clock["preemptions"] > 0
    assert (compiled.runs["outcome"] == layout.OK).sum() > 10
