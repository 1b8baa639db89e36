"""The shape of a workload by hand: a session of three turns, one of one, and turns that nothing was appended to."""

from measure.metrics.trace import measure_shape
from tests.measure.metrics.made import request, run_of
from tracefile import Record, SessionId


def turn(name: str, begin_and_end_ms: tuple[float, float], prompt: int, output: int | None) -> Record:
    begin_ms, end_ms = begin_and_end_ms
    return request(
        name,
        begin_ms,
        session_id=None if name == "alone" else SessionId("s"),
        e2e_ms=end_ms - begin_ms,
        prompt_tokens=prompt,
        output_tokens=output,
    )


THREE = [turn("1", (0.0, 100.0), 32, 16), turn("2", (600.0, 800.0), 56, 20), turn("3", (2000.0, 2050.0), 88, 64)]


def test_a_session_and_a_request_alone() -> None:
    shape = measure_shape(run_of([*THREE, turn("alone", (10.0, 15.0), 500, 7)]))
    found = {name: (one.n, one.mean, one.p50, one.p90, one.max) for name, one in shape.items() if one is not None}
    assert found == {
        "turns": (2, 2.0, 1.0, 3.0, 3.0),
        "first_prompt_tokens": (2, 266.0, 32.0, 500.0, 500.0),
        "turn_output_tokens": (2, 18.0, 16.0, 20.0, 20.0),
        "appended_tokens": (2, 10.0, 8.0, 12.0, 12.0),  # 56 − 32 − 16 and 88 − 56 − 20
        "pause_ms": (2, 850.0, 500.0, 1200.0, 1200.0),
        "final_output_tokens": (2, 35.5, 7.0, 64.0, 64.0),
    }
