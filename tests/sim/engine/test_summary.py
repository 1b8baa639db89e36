"""The summary that ``sim run`` prints of a prediction."""

import pytest

from sim.engine.run import Summary, summarise
from tracefile.records.schema import Record, RequestId


def summary_of(spans_ms: list[tuple[float, float]]) -> Summary:
    """Summary of requests with these arrival times and durations."""
    records = [
        Record(request_id=RequestId(f"r{number}"), arrival_ms=arrival_ms, e2e_ms=e2e_ms)
        for number, (arrival_ms, e2e_ms) in enumerate(spans_ms)
    ]
    return summarise(records, 0, 0)


@pytest.mark.parametrize(
    ("spans_ms", "is_overrun"),
    [
        ([(0.0, 5e3), (100e3, 200e3)], True),  # 100 s of arrivals, and 200 s more to serve them
        ([(0.0, 5e3), (100e3, 90e3)], False),  # a long last response
        ([(0.0, 250e3), (100e3, 5e3)], True),  # whoever ends last need not have come last
        ([(0.0, 5e3), (1e3, 50e3)], False),  # a burst of a second, served within a minute
        ([], False),
    ],
)
def test_overrun_is_a_drain_longer_than_the_arrivals(spans_ms: list[tuple[float, float]], is_overrun: bool) -> None:
    summary = summary_of(spans_ms)
    assert summary.is_overrun is is_overrun
    assert not (spans_ms and summary.drain_ms < 0.0)
