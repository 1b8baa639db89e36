"""The verdict on the prefix cache, by the best account that the trace has."""

import pytest

from measure.metrics.tables import verdict
from measure.metrics.trace import measure_run
from tests.measure.metrics.made import request, run_of
from tracefile.records.schema import Record, SessionId

SAME = {"prompt_tokens": 64, "block_hashes": [1, 2, 3, 4], "ttft_ms": 40.0, "e2e_ms": 50.0}
TURNS = [
    request("1", 0.0, session_id=SessionId("s"), turn=1, **SAME | {"ttft_ms": 1_100.0, "cached_tokens": 0}),
    request("2", 5.0, session_id=SessionId("s"), turn=2, **SAME | {"ttft_ms": 300.0, "cached_tokens": 32}),
]
OUTPUTS = {"output_tokens": 6, "e2e_ms": 1.0}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        # An unlimited cache has three blocks of the second prompt: the last token is always computed.
        (
            TURNS,
            "The prefix cache served 25.0 % of 128 prompt tokens (unlimited cache: 37.5 %); median TTFT: 300 ms "
            "in turns 2+, 1.1 s in first turns.",
        ),
        (
            [request("1", 0.0, **SAME), request("2", 5.0, **SAME)],
            "The engine reports no cached tokens; an unlimited prefix cache would serve 37.5 % of 128 prompt tokens; "
            "median TTFT: 40 ms.",
        ),
        (
            [
                request("1", 0.0, session_id=SessionId("s"), prompt_tokens=10, **OUTPUTS),
                request("2", 5.0, session_id=SessionId("s"), prompt_tokens=22, **OUTPUTS),
            ],
            "The trace has no data on the prefix cache.",
        ),
        (
            [request("1", 0.0, prompt_tokens=10, cached_tokens=0)],
            "The prefix cache served 0 % of 10 prompt tokens.",
        ),
    ],
)
def test_the_verdict(records: list[Record], message: str) -> None:
    assert verdict(measure_run(run_of(records, block_size=16))) == message
