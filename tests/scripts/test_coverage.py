"""The known engine of the coverage benchmark, and what can be told of a speed at all."""

from pathlib import Path

import pytest

from scripts.coverage import limit_rows
from scripts.knownengine import SESSIONS, TURNS, capture, known_engine, scaled, sessions
from tracefile import load_trace


def test_no_test_of_a_speed_finds_15_percent_in_one_capture() -> None:
    rows = {row[0]: row[1:] for row in limit_rows()}
    # ln 1.15 / (0.05 · √(1 + 1/5)) = 2.552; Φ(1.645 − 2.552) = 0.18 pass where the drift is known; five tell less.
    assert rows["1"][2] == "0.32 / 0.32 / 0.18"
    # Three captures: 3.828; they also tell of the drift.
    assert rows["3"][2] == "0.07 / 0.04 / 0.01"


def test_sessions_of_the_known_engine_are_paced(tmp_path: Path) -> None:
    engine = known_engine()
    _, records = load_trace(capture(tmp_path / "a.jsonl", sessions(3), scaled(engine, 2.0), 5))
    by_id = {record.request_id: record for record in records}
    assert len(by_id) == SESSIONS * TURNS
    children = [record for record in records if record.parent_id is not None]
    assert len(children) == SESSIONS * (TURNS - 1)
    for child in children:
        end_ms = by_id[child.parent_id or child.request_id].end_ms() or 0.0
        assert child.arrival_ms == pytest.approx(end_ms + (child.think_ms or 0.0), abs=0.01)
        assert (child.cached_tokens or 0) >= 3_000 // 32 * 32
    assert scaled(engine, 2.0).costs == tuple(2.0 * cost for cost in engine.costs)
