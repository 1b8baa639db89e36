"""Ready means: it serves. Whether it records is said beside that, and takes no tap out of service."""

import pytest

from tap.admin.health import RECORDER_SILENCE_S, reasons_against, reasons_not_recording
from tap.admin.state import LiveState
from tap.ipc.exchange import AdminSetup, Progress, ServiceStats
from tap.ipc.feed import RecorderStats

ENGINE = "http://engine:8000"
NOW_S = 1000.0


@pytest.fixture
def state() -> LiveState:
    """Of a tap that serves and records."""
    found = LiveState(AdminSetup(listen_fd=0, feed_socket="", trace="t.jsonl"))
    found.take(ServiceStats(upstreams=[ENGINE], workers=2, workers_up=1), NOW_S)
    found.take(RecorderStats(pid=1, progress=Progress()), NOW_S)
    found.reachable = {ENGINE: True}
    return found


def test_a_tap_that_serves_and_records_has_nothing_against_it(state: LiveState) -> None:
    assert reasons_against(state) == reasons_not_recording(state, NOW_S) == []


def test_nothing_that_ails_the_recorder_is_a_reason_against_serving(state: LiveState) -> None:
    later_s = NOW_S + RECORDER_SILENCE_S + 5
    assert reasons_not_recording(state, later_s) == ["the recorder has been silent for 20 s"]
    state.take(RecorderStats(pid=1, progress=Progress(), writing=False), NOW_S)
    assert reasons_not_recording(state, NOW_S) == ["the recorder cannot write the trace"]
    state.take(ServiceStats(upstreams=[ENGINE], workers=2, workers_up=2, recorder_up=False), NOW_S)
    assert reasons_not_recording(state, NOW_S) == ["the recorder is down"]
    assert reasons_against(state) == []


def test_what_keeps_it_from_serving_is_named(state: LiveState) -> None:
    state.reachable = {ENGINE: False}
    assert reasons_against(state) == ["no upstream takes connections"]
    state.take(ServiceStats(upstreams=[ENGINE], workers=2, workers_up=0, draining=True), NOW_S)
    assert reasons_against(state) == ["the tap is draining", "no worker is up", "no upstream takes connections"]
