"""The rule of the drift alarm, state by state, and the range of paces that a model lets expect."""

from math import exp, hypot, log, sqrt

import msgspec
import pytest

from sim.fit.pace import Pace
from sim.latency.modelfile import default_model
from sim.watch.modelwatch import LEAST, DriftAlarm, allowed_reach, is_outside


def test_the_alarm_goes_on_after_three_judgements_outside_and_off_after_three_inside() -> None:
    alarm = DriftAlarm()
    steps = [
        # Time, outside, and then: drifted, since.
        (1.0, True, False, None),
        (2.0, True, False, None),
        (3.0, False, False, None),  # two are not enough, and the count begins anew
        (4.0, True, False, None),
        (5.0, True, False, None),
        (6.0, True, True, 4.0),
        (7.0, False, True, 4.0),
        (8.0, False, True, 4.0),
        (9.0, True, True, 4.0),
        (10.0, False, True, 4.0),
        (11.0, False, True, 4.0),
        (12.0, False, False, None),
    ]
    for at_ms, outside, drifted, since_ms in steps:
        alarm.judge(outside=outside, at_ms=at_ms)
        assert (alarm.drifted, alarm.since_ms) == (drifted, since_ms), at_ms


@pytest.mark.parametrize(
    ("log_sd", "freedom", "score"),
    [(0.03, 0, 1.959964), (0.03, 1, 12.706205), (0.03, 4, 2.776445)],
)
def test_a_models_range_is_students_t_of_its_captures(log_sd: float, freedom: int, score: float) -> None:
    model = msgspec.structs.replace(default_model(), drift_log_sd=log_sd, drift_freedom=freedom)
    assert allowed_reach(model) == pytest.approx(score * log_sd, rel=1e-6)


def test_a_drift_below_five_per_cent_is_never_told() -> None:
    assert allowed_reach(default_model()) == LEAST == log(1.05)


@pytest.mark.parametrize(("beyond", "outside"), [(0.999, False), (1.001, True)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_pace_is_outside_by_more_than_range_and_measurement_together(
    beyond: float, sign: int, *, outside: bool
) -> None:
    """Eight blocks of spread 0.04: the mean's error is t(7) · 0.04 / 3."""
    measured = 2.364624 * 0.04 / sqrt(9)
    factor = exp(sign * beyond * hypot(0.1, measured))
    assert is_outside(Pace(factor, 0.04, 7, 1_000), 0.1) is outside
