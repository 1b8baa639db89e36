"""Health checks: each on a run that fails it, with its figure, and on one that does not."""

from collections.abc import Sequence
from typing import Any

import pytest

from measure.metrics.client import measure_client
from measure.metrics.health import check_health
from measure.metrics.hits import count_hits
from measure.metrics.results import HealthCheck
from measure.metrics.tables import health_lines
from tests.measure.metrics.made import request, run_of
from tracefile.records.schema import Record


def healthy(count: int = 60) -> list[Record]:
    """Requests of one turn a second, each sent on time and as planned, with two blocks of a shared prompt."""
    return [
        request(
            f"r{number}",
            1000.0 * number,
            scheduled_ms=1000.0 * number,
            ttft_ms=100.0,
            e2e_ms=200.0,
            prompt_tokens=48,
            planned_prompt_tokens=48,
            cached_tokens=32 if number else 0,
            output_tokens=5,
            max_tokens=5,
            block_hashes=[1, 2, 100 + number],
            parent_id=f"r{number - 1}" if number else None,
        )
        for number in range(count)
    ]


def checked(records: Sequence[Record], **meta: Any) -> dict[str, HealthCheck]:
    run = run_of(records, block_size=16, **meta)
    return {item.name: item for item in check_health(run, measure_client(run), count_hits(run))}


def test_a_healthy_run() -> None:
    result = checked(healthy())
    assert {name: item.verdict for name, item in result.items()} == dict.fromkeys(result, "ok")
    assert result["hit accounting"].figure == ("reported 65.6 % of prompt tokens, unlimited cache 65.6 % (100 % of it)")
    assert health_lines(list(result.values())) == ["health: 7 checks ok, 0 warnings, 0 without data in the trace"]


def change(records: list[Record], rows: Sequence[int], **fields: Any) -> list[Record]:
    for row in rows:
        for name, value in fields.items():
            setattr(records[row], name, value)
    return records


ABORTED = {"status": "timeout"}
LATE = {"scheduled_ms": 6990.0}
FAULTS: list[tuple[str, Sequence[int], dict[str, Any], str, str]] = [
    ("success", [3], ABORTED, "warning", "1 of 60 did not end well"),
    ("success", range(4), ABORTED, "bad", "4 of 60 did not end well"),
    ("lag", [7], LATE, "warning", "1 of 60 late by more than 5.0 ms; lag p99 10 ms"),
    ("lag", [7], LATE | {"held": True}, "ok", "0 of 59 late by more than 5.0 ms; lag p99 0 µs"),
    (
        *("hit accounting", range(60), {"cached_tokens": 0}, "warning"),
        "reported 0 % of prompt tokens, unlimited cache 65.6 % (0 % of it)",
    ),
]


@pytest.mark.parametrize(("name", "rows", "fields", "verdict", "figure"), FAULTS)
def test_a_run_that_fails_a_check(
    name: str, rows: Sequence[int], fields: dict[str, Any], verdict: str, figure: str
) -> None:
    result = checked(change(healthy(), rows, **fields))[name]
    assert (result.verdict, result.figure) == (verdict, figure)
    assert bool(result.where) == (verdict != "ok")


def test_tap_trace_has_no_send_lag() -> None:
    result = checked(healthy(), source="tap")
    assert [name for name, item in result.items() if item.verdict == "unknown"] == ["lag"]
