"""Sessions over several engines against a slow, obvious fleet."""

import random
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.routing.costs import routing_costs
from engines.routing.routes import make_router, parse_route
from sim.engine.fleetplan import FleetPlan
from sim.engine.fleets import FleetEngine, routed_requests, run_fleet
from sim.engine.simulatedrequest import OUTCOMES
from sim.latency.modelfile import make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.engine.test_compiled import NOISE, STEP, load
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.slow_fleet import SlowFleet
from tracefile.records.schema import Meta, SessionId

MODEL_COSTS = {**STEP, "frontend_base_ms": 1.1, "frontend_ms_per_prompt_token": 0.07}
ROUTES = st.one_of(
    st.sampled_from(["round-robin", "least-loaded", "prefix", "cost"]),
    st.builds(
        "{}:{}".format,
        st.sampled_from(["prefix", "cost"]),
        st.sampled_from(["knowledge=none", "index-blocks=1", "index-blocks=7", "lag=40ms", "lag=1s:index-blocks=20"]),
    ),
)


def planned(seed: int, requests: int, spacing_ms: float) -> Arrivals:
    """Requests in sessions, of which some share their prompts' beginnings."""
    rng = random.Random(seed)
    records = load(rng, requests, spacing_ms)
    for record in records:
        if rng.random() < 0.7:
            record.session_id = SessionId(f"s{rng.randrange(4)}")
    return plan_arrivals(Meta(block_size=4), records, 4, replay_sessions=True)


def fleet_of(count: int, blocks: int, mixed: bool, placement: FrontendPlacement = "parallel") -> list[FleetEngine]:
    config = EngineConfig(block_size=4, num_gpu_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=32)
    slow = {name: 2 * ms for name, ms in MODEL_COSTS.items()}
    models = [
        make_model(slow if mixed and position == 1 else MODEL_COSTS, config, NOISE, placement)
        for position in range(count)
    ]
    return [FleetEngine(str(position), config, model) for position, model in enumerate(models)]


# A client disconnects during the first step of its engine, before the next arrival.
@example(planned(29164, 5, 2.0), fleet_of(2, 60, False), "least-loaded")
@settings(max_examples=15, deadline=None)
@given(
    arrivals=st.builds(planned, st.integers(0, 10**6), st.integers(1, 16), st.sampled_from([2.0, 30.0])),
    engines=st.builds(
        fleet_of, st.integers(2, 3), st.just(60), st.booleans(), st.sampled_from(get_args(FrontendPlacement))
    ),
    route=ROUTES | st.sampled_from(["session", "workload"]),
)
def test_fleet_equals_the_slow_fleet(arrivals: Arrivals, engines: list[FleetEngine], route: str) -> None:
    names = tuple(engine.name for engine in engines)
    result = run_fleet(arrivals, routed_requests(arrivals, 4), engines, FleetPlan(names, route), 7)
    costs = [routing_costs(engine.model.cost_by_name, engine.config.max_num_batched_tokens) for engine in engines]
    mixed = engines[0].model.costs != engines[1].model.costs
    is_shared = engines[0].model.frontend_placement == "shared_core"
    speeds = [1.0, 0.5, 1.0][: len(engines)] if mixed else []
    router = make_router(parse_route(route), names, capacity_blocks=59, costs=costs, speeds=speeds)
    slow = SlowFleet(objects(arrivals), engines, router, 7)
    slow.run()
    requests = result.requests
    assert {
        position: engine for position, engine in enumerate(result.dispatch.engine_of) if engine >= 0
    } == slow.engine_of
    for position, run in slow.runs.items():
        request_run = requests[position]
        assert OUTCOMES[request_run.outcome] == run.outcome
        assert request_run.num_delivered == len(run.token_steps)
        result_ms = [request_run.arrival_ms, request_run.ttft_ms, request_run.e2e_ms]
        expected_ms = [np.nan if time is None else time for time in (run.arrival_ms, run.ttft_ms, run.e2e_ms)]
        # On a shared core a turn may come a rounding before the end of its parent, and split the step that ends it.
        assert result_ms == pytest.approx(expected_ms, rel=1e-12 if is_shared else 0, abs=0, nan_ok=True)
