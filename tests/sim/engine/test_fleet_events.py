"""Rolling deploys, scale-up and the words of ``--event``."""

import numpy as np
import pytest

from sim.engine.dispatch import Timeline
from sim.engine.fleet_events import Deploy, FleetEvent, Kill, ScaleUp, check_events, parse_event
from sim.engine.simulatedrequest import OUTCOMES
from sim.workload.arrivals import Arrivals, plan_arrivals
from tests.sim.fleets import make_request, routed, runs_of
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta


def steady(requests: int, every_ms: float) -> Arrivals:
    records = [make_request(number, arrival_ms=every_ms * number, prompt=8, output=4) for number in range(requests)]
    return plan_arrivals(Meta(block_size=4), records, 4)


def test_rolling_deploy_restarts_engines_with_cold_caches() -> None:
    events = Timeline([Deploy(at_s=0.1, startup_s=0.2)], 3, 0.0)
    load = routed(steady(100, 10.0), 3, lambda request, engines: request.number % len(engines), events)
    happened = [(what, engine) for _, what, engine in load.dispatch.log]
    assert happened == [(what, engine) for engine in range(3) for what in ("draining", "up")]
    times_ms = [at_ms for at_ms, _, _ in load.dispatch.log]
    assert times_ms == sorted(times_ms)
    arrival_ms = runs_of(load.requests)["arrival_ms"]
    for engine, (down_ms, up_ms) in enumerate(zip(times_ms[::2], times_ms[1::2], strict=True)):
        assert up_ms >= down_ms + 200.0
        away = (arrival_ms >= down_ms) & (arrival_ms < up_ms)
        assert away.any()
        assert engine not in np.array(load.dispatch.engine_of)[away]
    assert [life.number for life in load.fleet.lives] == [0, 1, 2, 0, 1, 2]
    assert (runs_of(load.requests)["outcome"] == 1).all()


def test_scale_up_by_arrival_rate() -> None:
    """Ten requests a second at a target of five per engine: the sixth request starts the second engine."""
    events = Timeline([ScaleUp(initial=1, rate=5.0, window_s=1.0, startup_s=0.3)], 3, 0.0)
    load = routed(steady(40, 100.0), 3, lambda request, engines: request.number % len(engines), events)
    start_ms = next(at_ms for at_ms, what, engine in load.dispatch.log if what == "starting")
    assert start_ms == 500.0
    assert (800.0, "up", 1) in load.dispatch.log
    assert set(load.dispatch.engine_of[:8]) == {0}
    assert 1 in load.dispatch.engine_of[8:12]
    assert ("up", 2) in [
        (what, engine) for _, what, engine in load.dispatch.log
    ]  # 11 in a window that counts both ends


@pytest.mark.parametrize(
    ("events", "happened"),
    [
        (
            [Kill(engine=0, at_s=0.1, back_s=0.3), Kill(engine=0, at_s=0.2, back_s=0.4)],
            [(100.0, "died"), (200.0, "died"), (400.0, "up")],
        ),
        (
            [Deploy(at_s=0.1, startup_s=0.3), Kill(engine=0, at_s=0.3, back_s=0.45)],
            [(100.0, "draining"), (300.0, "died"), (450.0, "up")],
        ),
        (
            [ScaleUp(initial=1, rate=5.0, window_s=1.0, startup_s=0.3), Kill(engine=1, at_s=0.1, back_s=0.4)],
            [(0.0, "not started"), (100.0, "died"), (400.0, "up"), (550.0, "starting")],
        ),
    ],
)
def test_duplicate_start_is_ignored(events: list[FleetEvent], happened: list[tuple[float, str]]) -> None:
    """Ten requests a second of an output too long for the time between two starts."""
    records = [make_request(number, arrival_ms=50.0 + 100.0 * number, prompt=8, output=30) for number in range(8)]
    watched = int(isinstance(events[0], ScaleUp))
    arrivals, timeline = plan_arrivals(Meta(block_size=4), records, 4), Timeline(events, 3, 0.0)
    load = routed(arrivals, 3, lambda request, engines: len(engines) - 1 if watched else 0, timeline)
    assert [(at_ms, what) for at_ms, what, engine in load.dispatch.log if engine == watched] == happened
    outcomes = [OUTCOMES[code] for code in runs_of(load.requests)["outcome"].tolist()]
    assert set(outcomes[1:]) == {"ok"}


def test_event_syntax() -> None:
    assert parse_event("kill:engine=2:at=10m:back=15m") == Kill(engine=2, at_s=600.0, back_s=900.0)
    assert parse_event("kill:engine=0:at=5s") == Kill(engine=0, at_s=5.0)
    assert parse_event("deploy:at=20m:startup=30s") == Deploy(at_s=1200.0, startup_s=30.0)
    assert parse_event("scale-up:from=2:rate=1.5") == ScaleUp(initial=2, rate=1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("die:at=1s", "unknown kind 'die'; expected one of kill, deploy, scale-up"),
        ("kill:engine=1:at=5s:back=2s", "back is not after at"),
        ("scale-up:from=1:rate=nan", "rate=nan; expected more than 0"),
    ],
)
def test_invalid_events_are_reported(text: str, message: str) -> None:
    with pytest.raises(InputError, match="--event") as caught:
        parse_event(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Kill(engine=4, at_s=1.0)], "engine=4; expected 0 to 3"),
        ([ScaleUp(initial=5, rate=1.0)], "from=5; expected at most the fleet's 4"),
        ([Deploy(at_s=1.0), Deploy(at_s=2.0)], "Deploy twice"),
    ],
)
def test_events_of_absent_engines(events: list[FleetEvent], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_events(events, 4)
    assert message in str(caught.value)
