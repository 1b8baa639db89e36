"""When a front end on the engine's core worked on what, from literal schedules."""

import pytest

from sim.fit.observations import Reception
from sim.fit.schedule import CapturedStep
from sim.latency.terms import RECEIVED, RECEIVED_TOKENS, TERMS
from sim.workload.arrivals import Arrival
from tracefile import Record, RequestId


def arrival(name: str, at_ms: float, prompt_tokens: int) -> Arrival:
    return Arrival(Record(request_id=RequestId(name)), "runs", prompt_tokens, 4, [], at_ms)


def step(start_ms: float, end_ms: float, opener: int | None = None) -> CapturedStep:
    return CapturedStep(start_ms, end_ms, (1.0,), [], 0, opener, continues=opener is None)


def costs(base_ms: float, ms_per_prompt_token: float) -> list[float]:
    values = [0.0] * len(TERMS)
    values[RECEIVED], values[RECEIVED_TOKENS] = base_ms, ms_per_prompt_token
    return values


def test_it_has_the_core_alone_at_rest_and_half_of_it_beside_a_step() -> None:
    # The first takes 4 ms alone, from 10 on; the second comes in the step and takes 8 of its ms for its own 4.
    arrivals = [arrival("a", 10.0, 100), arrival("b", 20.0, 100)]
    received = Reception(arrivals, [step(10.0, 40.0, opener=0), step(40.0, 60.0)], costs(2.0, 0.02))
    assert received.between(10.0, 12.0) == pytest.approx((0.5, 50.0))
    assert received.between(10.0, 14.0) == pytest.approx((1.0, 100.0))
    assert received.between(14.0, 20.0) == pytest.approx((0.0, 0.0))
    assert received.between(20.0, 24.0) == pytest.approx((0.5, 50.0))
    assert received.between(14.0, 60.0) == pytest.approx((1.0, 100.0))


def test_one_waits_for_the_other() -> None:
    arrivals = [arrival("a", 0.0, 100), arrival("b", 5.0, 300)]
    received = Reception(arrivals, [step(0.0, 100.0, opener=0)], costs(10.0, 0.0))
    # a alone until 10, then b beside the step until 30.
    assert received.between(0.0, 10.0) == pytest.approx((1.0, 100.0))
    assert received.between(10.0, 20.0) == pytest.approx((0.5, 150.0))
    assert received.between(30.0, 100.0) == pytest.approx((0.0, 0.0))


def test_a_capture_of_which_nothing_ran_is_no_error() -> None:
    Reception([], [], costs(1.0, 0.0))
