"""Records of a run: gaps as JSON has them, requests in flight, and the order of arrivals before it."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.cache.vectors import floats, integers
from sim.engine.gap_json import DECIMALS, GapTexts
from sim.engine.results import finished_records, rounded
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivalorder import by_arrival, by_session
from sim.workload.arrivals import NOBODY, plan_arrivals
from tests.sim.engine.test_compiled import CONFIGS, STEP
from tests.sim.fleets import make_request
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.simulation import results_of, simulate
from tracefile.records.schema import Meta


@given(st.lists(st.integers(0, 10**10), max_size=20), st.lists(st.booleans(), min_size=21, max_size=21))
def test_gaps_are_json(parts: list[int], has_token: list[bool]) -> None:
    """Tokens of a request in some of the steps."""
    delivered_ms = np.cumsum([0, *parts]) / 10**DECIMALS
    steps = [step for step in range(len(delivered_ms)) if has_token[step]]
    runs: list[int] = []
    for step in steps:
        if runs and runs[-2] + runs[-1] == step:
            runs[-1] += 1
        else:
            runs += [step, 1]
    expected = np.round(np.diff(delivered_ms[steps]), DECIMALS).tolist()
    assert GapTexts(floats(delivered_ms)).array(integers(runs)) == msgspec.json.encode(expected)


@given(
    st.lists(
        st.floats(-1e15, 1e15)
        | st.integers(-(10**13), 10**13).map(lambda halves: halves / 20_000)  # halves of the last decimal
        | st.sampled_from([0.0, -0.0, np.nan]),
        min_size=1,
    )
)
def test_times_round_like_python(times_ms: list[float]) -> None:
    expected = [round(time_ms, DECIMALS) for time_ms in times_ms]
    assert list(map(repr, rounded(np.array(times_ms)).tolist())) == list(map(repr, expected))


@given(CONFIGS, st.lists(st.sampled_from([0.0, 1.0, 7.5, 300.0]), min_size=1, max_size=12))
def test_records_are_in_finish_order_with_concurrency(config: EngineConfig, times_ms: list[float]) -> None:
    records = [make_request(n, arrival_ms=at_ms, prompt=9 + n, output=3) for n, at_ms in enumerate(times_ms)]
    arrivals = objects(plan_arrivals(Meta(block_size=4), records, config.block_size))
    results = results_of(simulate(arrivals, config, make_model(STEP, config)).runs)
    spans_ms = [(request.arrival_ms, request.end_ms()) for request in results.requests()]
    result = list(finished_records(results, config.block_size))
    assert [request.end_ms() for request in result] == sorted(request.end_ms() or 0.0 for request in result)
    for record in result:
        arrived_ms = record.arrival_ms
        assert record.concurrency == max(1, sum(begin <= (arrived_ms or 0.0) < end for begin, end in spans_ms))


def test_requests_are_ordered_by_earliest_arrival() -> None:
    records = [
        make_request(0, arrival_ms=5.0, prompt=8, output=2),
        make_request(1, arrival_ms=90.0, prompt=8, output=2, parent=0),
        make_request(2, arrival_ms=9.0, prompt=8, output=2),
        make_request(3, arrival_ms=5.0, prompt=8, output=2),
    ]
    for record in records:
        record.e2e_ms = 1.0
    arrivals = plan_arrivals(Meta(block_size=4), records, 4)
    assert by_arrival(arrivals).ids == ["r0", "r3", "r2", "r1"]
    paced = by_session(plan_arrivals(Meta(block_size=4), records, 4, replay_sessions=True))
    assert paced.ids == ["r0", "r3", "r2", "r1"]
    assert paced.parents.tolist() == [NOBODY, NOBODY, NOBODY, 0]
    assert paced.think_ms[3] == pytest.approx(5.0)
