"""Each engine of a fleet equals the same engine alone with the routed requests."""

import random
from dataclasses import replace

import numpy as np
import pytest

from sim.engine import simulatedrequest as outcomes
from sim.engine.dispatch import Timeline
from sim.engine.fleet import ALL_ENDED
from sim.engine.fleet_events import Kill
from sim.engine.fleets import FleetEngine, FleetLoad, engine_seed
from sim.engine.results import finished_records
from sim.engine.simulation import simulate
from sim.latency.modelfile import Model, make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import NOBODY, Arrivals, plan_arrivals
from tests.sim.engine.test_compiled import NOISE, STEP, load
from tests.sim.fleets import RUN_FIELDS, make_request, routed, runs_of
from tracefile.records.schema import Meta, Record, RequestId

SEED = 7


def planned(records: list[Record], placement: FrontendPlacement, *, paced: bool) -> Arrivals:
    """Arrivals; on a shared core without aborts and zero pauses, whose times are exact only up to rounding."""
    if placement == "shared_core":
        for record in records:
            if record.status == "client_abort":
                record.status, record.output_tokens = "ok", record.output_tokens or 1
            if record.think_ms == 0.0:
                record.think_ms = 3.21
    return plan_arrivals(Meta(block_size=4), records, 4, replay_sessions=paced)


def run_by_table(arrivals: Arrivals, engines: list[FleetEngine], table: list[int]) -> FleetLoad:
    load = FleetLoad(arrivals, engines, SEED, keeps_rows=True)
    fleet, position, reported_ms = load.fleet, load.fleet.advance(), -np.inf
    while position >= 0 or fleet.events.size:
        while fleet.events.size and fleet.events.next_ms <= fleet.reported_until_ms:
            assert fleet.events.next_ms >= reported_ms  # no event is reported to a router late
            reported_ms = fleet.events.next_ms
            fleet.events.pop()
        position = fleet.advance(position, table[position]) if position >= 0 else position
    assert position == ALL_ENDED
    return load


def require_same_as_alone(load: FleetLoad, engine: int, config: EngineConfig, model: Model) -> None:
    """Run the requests of an engine alone, at the times at which they were routed."""
    positions, runs = np.flatnonzero(load.life_of() == engine), runs_of(load.requests)
    local = load.arrivals.select(positions)
    local = replace(local, arrival_ms=runs["arrival_ms"][positions].copy(), parents=np.full(len(positions), NOBODY))
    alone = simulate(local, config, model, engine_seed(SEED, engine), keeps_rows=True)
    served = [request.served for request in load.requests]
    here = [request for position in positions.tolist() if (request := served[position]) is not None]
    for name in (*RUN_FIELDS, "cached_tokens", "preemptions"):
        fleet_values, single_values = ([getattr(rows, name) for rows in subset] for subset in (here, alone.requests))
        np.testing.assert_array_equal(single_values, fleet_values, err_msg=name)
    for name in ("starts_ms", "ends_ms", "delivered_ms", "rows"):
        assert list(getattr(load.fleet.lives[engine].engine, name)) == list(getattr(alone.engine, name))


@pytest.mark.parametrize("placement", ["parallel", "serial", "shared_core"])
@pytest.mark.parametrize("number", range(10))
def test_engine_in_a_fleet_equals_the_engine_alone(number: int, placement: FrontendPlacement) -> None:
    rng = random.Random(number)
    arrivals = planned(load(rng, 60, rng.choice([5.0, 30.0, 120.0])), placement, paced=number % 2 == 1)
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks=rng.choice([60, 200, 400]),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        async_scheduling=number % 4 < 2,
        kv_groups="full:4+window(12):4" if number % 3 == 2 else None,
    )
    costs = {**STEP, "frontend_base_ms": 1.1, "frontend_ms_per_prompt_token": 0.07}
    model = make_model(costs, config, NOISE, placement)
    count = rng.choice([1, 2, 3, 5])
    engines = [FleetEngine(str(position), config, model) for position in range(count)]
    fleet = run_by_table(arrivals, engines, [rng.randrange(count) for _ in range(len(arrivals))])
    runs = runs_of(fleet.requests)
    assert (runs["outcome"] != outcomes.NO_OUTCOME).all()
    for position in np.flatnonzero(arrivals.parents != NOBODY).tolist():
        end_ms = fleet.requests[arrivals.parents[position]].end_ms()
        assert runs["arrival_ms"][position] == end_ms + arrivals.think_ms[position]
    for engine in range(count):
        if (fleet.life_of() == engine).any():
            require_same_as_alone(fleet, engine, config, model)


def test_router_has_exact_counts() -> None:
    records = [make_request(number, arrival_ms=4.0 * number, prompt=40, output=5) for number in range(12)]
    arrivals, seen = plan_arrivals(Meta(block_size=4), records, 4), []

    def watch(request, engines):  # type: ignore[no-untyped-def]
        seen.append((request.arrival_s, [(state.requests, state.prefill_tokens) for state in engines]))
        return request.number % 2

    load = routed(arrivals, 2, watch)
    runs, engine_of = runs_of(load.requests), load.dispatch.engine_of
    for number, (now_s, counts) in enumerate(seen):
        before = [
            position
            for position in range(number)
            if runs["arrival_ms"][position] + runs["e2e_ms"][position] > now_s * 1e3
        ]
        waiting = [
            position for position in before if runs["arrival_ms"][position] + runs["ttft_ms"][position] > now_s * 1e3
        ]
        for engine in range(2):
            of_engine = [position for position in before if engine_of[position] == engine]
            prefills = 40.0 * sum(engine_of[position] == engine for position in waiting)
            assert counts[engine] == (len(of_engine), prefills)


def test_end_is_reported_before_a_request_without_engine() -> None:
    """The second request failed in the capture, before it got to an engine."""
    records = [make_request(number, arrival_ms=500.0 * number, prompt=8, output=2) for number in range(3)]
    records[1].status, records[1].http_status, records[1].e2e_ms = "error", 429, 1.5
    arrivals, seen = plan_arrivals(Meta(block_size=4), records, 4), []

    def watch(request, engines):  # type: ignore[no-untyped-def]
        seen.append(engines[0].requests)
        return 0

    routed(arrivals, 1, watch)
    assert seen == [0, 0]


def test_dead_engine_moves_requests_and_aborts_streams() -> None:
    """Four requests at once, two on each engine; engine 1 dies when one of its two streams."""
    records = [make_request(number, arrival_ms=number, prompt=60, output=20) for number in range(4)]
    arrivals = plan_arrivals(Meta(block_size=4), records, 4)
    calm_load = routed(arrivals, 2, lambda request, engines: request.number % len(engines))
    calm = runs_of(calm_load.requests)
    first_ms = calm["arrival_ms"] + calm["ttft_ms"]
    at_ms = (first_ms[1] + first_ms[3]) / 2.0
    events = Timeline([Kill(engine=1, at_s=at_ms / 1e3)], 2, 0.0)
    load = routed(arrivals, 2, lambda request, engines: request.number % len(engines), events)
    runs = runs_of(load.requests)
    assert [outcomes.OUTCOMES[code] for code in runs["outcome"].tolist()] == ["ok", "lost", "ok", "ok"]
    assert runs["ttft_ms"][1] == calm["ttft_ms"][1]
    assert runs["arrival_ms"][1] + runs["e2e_ms"][1] == pytest.approx(at_ms)
    assert load.dispatch.engine_of == [0, 1, 0, 0]
    assert runs["arrival_ms"][3] == 3.0  # its wait counts from its first arrival
    assert runs["arrival_ms"][3] + runs["ttft_ms"][3] > at_ms
    records_of = {record.request_id: record for record in finished_records(load.results(), 4)}
    assert records_of[RequestId("r1")].status == "upstream_abort"
    assert [record.upstream for _, record in sorted(records_of.items())] == ["0", "1", "0", "0"]


def test_session_continues_on_another_engine() -> None:
    turns = [make_request(0, arrival_ms=0.0, prompt=8, output=4), make_request(1, parent=0, prompt=16, output=4)]
    arrivals = plan_arrivals(Meta(block_size=4), turns, 4, replay_sessions=True)
    events = Timeline([Kill(engine=0, at_s=0.02)], 2, 0.0)
    load = routed(arrivals, 2, lambda request, engines: 0, events)
    assert load.dispatch.engine_of == [0, 1]
    assert [outcomes.OUTCOMES[code] for code in runs_of(load.requests)["outcome"].tolist()] == ["lost", "ok"]


def test_requests_fail_while_no_engine_is_up() -> None:
    records = [make_request(number, arrival_ms=1e3 * number, prompt=8, output=2) for number in range(3)]
    arrivals = plan_arrivals(Meta(block_size=4), records, 4)
    events = Timeline([Kill(engine=0, at_s=0.5, back_s=1.5)], 1, 0.0)
    requests = routed(arrivals, 1, lambda request, engines: 0, events).requests
    assert [outcomes.OUTCOMES[request.outcome] for request in requests] == ["ok", "no_engine", "ok"]


def test_request_without_an_engine_fails() -> None:
    """The only engine dies before the first token of a request that is in its prefill."""
    record = make_request(0, prompt=60, output=20)
    record.upstream, record.finish_reason = "of-the-capture", "stop"
    arrivals = plan_arrivals(Meta(block_size=4), [record], 4)
    fleet = routed(arrivals, 1, lambda request, engines: 0, Timeline([Kill(engine=0, at_s=0.005)], 1, 0.0))
    (result,) = finished_records(fleet.results(), 4)
    assert (result.status, result.error, result.http_status, result.finish_reason) == ("error", "no_engine", None, None)
    assert (result.upstream, result.ttft_ms, result.output_tokens, result.e2e_ms) == (None, None, None, 5.0)
    assert np.isnan(fleet.requests[0].ttft_ms)
