"""The demo's last lines: the outcome of each forecast, and the next steps of those that are no success."""

from types import SimpleNamespace
from typing import Any

from scripts.demo import verdict_lines


def test_last_lines_are_verdicts_and_next_steps() -> None:
    paces = {"predicted": None, "predicted-at-pace": 1.0712, "cold-predicted": None}
    warm, at_pace, cold, measured = (
        f"{label} against captured: TTFT of turns 2+ is 2.0 % too low at the median."
        for label in ("predicted", "predicted-at-pace", "cold-predicted", "cold")
    )
    result: Any = SimpleNamespace(
        forecasts={label: SimpleNamespace(pace=pace) for label, pace in paces.items()},
        headline=[cold, warm, at_pace, measured],
        next_steps=["capture it again"],
    )
    assert verdict_lines(result) == [warm, cold, "capture it again"]
