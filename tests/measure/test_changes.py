"""Changes of level in windows of estimates: steps that are there, and pages without any."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.changes import Series, find_changes, usual_drift

ERROR = 0.02


def series(logs: np.ndarray, error: float = ERROR, name: str = "pace") -> Series:
    """Estimates whose logs are these, each with a 95 % interval of this standard error."""
    values, reach = np.exp(logs), exp(1.96 * error)
    return Series(name, list(range(len(logs))), values, values / reach, values * reach)


def test_a_step_is_found_at_its_window_and_only_there() -> None:
    logs = ERROR * np.random.default_rng(1).standard_normal(24)
    logs[12:] += log(1.3)
    (found,) = find_changes([series(logs)])
    assert (found.name, found.place, found.within) == ("pace", 12, False)
    assert found.low < 1.3 < found.high
    assert found.score > found.threshold


def test_a_step_within_a_window_is_one_change() -> None:
    logs = ERROR * np.random.default_rng(2).standard_normal(24)
    logs[12:] += log(1.3)
    logs[11] += log(1.15)
    (found,) = find_changes([series(logs)])
    assert (found.place, found.within) == (11, True)
    assert found.low < 1.3 < found.high


def test_a_step_within_the_window_before_the_last_is_one_change() -> None:
    logs = np.zeros(20)
    logs[18:] = log(1.15), log(1.3)
    assert [(one.place, one.within) for one in find_changes([series(logs)])] == [(18, True)]


def test_there_and_back_are_two_changes() -> None:
    logs = np.zeros(12)
    logs[4:8] = log(1.3)
    found = find_changes([series(logs), series(np.zeros(12), name="t0_ms")])
    assert [(one.place, round(one.ratio, 2)) for one in found] == [(4, 1.3), (8, 0.77)]


def test_a_number_that_windows_lack_changed_where_another_did() -> None:
    """Windows 4 and 5 do not tell of the second number: its step may be at 4, 5 or 6, and the pace's is at 4."""
    pace, places = series(np.where(np.arange(10) < 4, 0.0, log(1.3))), [0, 1, 2, 3, 6, 7, 8, 9]
    logs = np.where(np.arange(8) < 4, 0.0, log(1.3))
    rare = series(logs, name="t0_ms")
    rare = Series(rare.name, places, rare.values, rare.lows, rare.highs)
    assert [one.place for one in find_changes([pace, rare])] == [4, 4]
    assert [one.place for one in find_changes([rare])] == [6]


def test_one_odd_window_between_others_of_one_level_is_two_changes() -> None:
    logs = np.zeros(12)
    logs[6] = log(1.3)
    assert [(one.place, one.within) for one in find_changes([series(logs)])] == [(6, False), (7, False)]


def test_a_step_within_usual_drift_is_none() -> None:
    """The same step beside windows that differ by as much anyway, which their intervals do not tell."""
    logs = 0.15 * np.random.default_rng(3).standard_normal(24)
    logs[12:] += log(1.1)
    assert usual_drift(series(logs), 0.0) == pytest.approx(0.15, rel=0.4)
    assert find_changes([series(logs)]) == []
    assert find_changes([series(np.array([0.0, log(1.3)]))], drift=0.0)
    assert find_changes([series(np.array([0.0, log(1.3)]))], drift=0.1) == []


def test_an_interval_from_zero_weighs_by_its_upper_end() -> None:
    wide = Series("x", [0, 1], np.array([1.0, 1.3]), np.zeros(2), np.array([3.0, 3.9]))
    assert find_changes([wide]) == []


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_pages_without_a_change_seldom_show_one(drift: float) -> None:
    """One page of a day with four numbers in a hundred may; drift from window to window counts as usual."""
    random, alarms = np.random.default_rng(4), 0
    for _ in range(40):
        logs = np.hypot(drift, ERROR) * random.standard_normal((4, 24))
        alarms += bool(find_changes([series(one, name=str(number)) for number, one in enumerate(logs)]))
    assert alarms <= 2


@given(
    logs=st.lists(st.floats(-1.0, 1.0), max_size=12),
    scale=st.floats(0.01, 100.0),
    error=st.floats(0.001, 0.5),
)
@settings(max_examples=20, deadline=None)
def test_changes_do_not_depend_on_the_unit(logs: list[float], scale: float, error: float) -> None:
    one, other = series(np.array(logs), error), series(np.array(logs) + log(scale), error)
    found = [[(change.place, change.within) for change in find_changes([each])] for each in (one, other)]
    assert found[0] == found[1]
    assert all(change.place in one.places for change in find_changes([one]))
