"""Made-up numbers of a tap's processes."""

from dataclasses import replace
from typing import Any

import msgspec

from measure.histogram import GAP_S, WAIT_S, add_value, empty_counts
from tap.admin.state import TapStats
from tap.ipc.messages import Progress, RecordNumbers, RequestCount, UpstreamStats, WorkerStats

UPSTREAM = "http://127.0.0.1:9"


def worker_stats(number: int = 0, **changes: Any) -> WorkerStats:
    stats = WorkerStats(
        worker=number,
        in_flight=7,
        connections=12,
        relayed=1_000,
        bytes_in=5_000_000,
        bytes_out=70_000_000,
        queue_bytes=120_000,
        queue_limit_bytes=128 << 20,
        loop_delay_s=0.0014,
        upstreams=[UpstreamStats(UPSTREAM, 400 + number, 3, False, 1, 8_192, 6_144)],
        misrouted={"raises": 2},
    )
    return msgspec.structs.replace(stats, **changes)


def record_numbers() -> RecordNumbers:
    ttft, gaps = empty_counts(WAIT_S), empty_counts(GAP_S)
    for value in (0.03, 0.07, 0.4):
        add_value(ttft, WAIT_S, value)
        add_value(gaps, GAP_S, value / 10)
    return RecordNumbers(
        requests=[
            RequestCount("/v1/chat/completions", "ok", 200, UPSTREAM, 780),
            RequestCount("/v1/chat/completions", "client_abort", 200, UPSTREAM, 15),
            RequestCount("/v1/completions", "error", 429, UPSTREAM, 5),
        ],
        ttft=ttft,
        gaps=gaps,
        prompt_tokens=2_000_000,
        cached_tokens=1_500_000,
        output_tokens=150_000,
    )


PROGRESS = Progress(
    received=810,
    recorded=800,
    hashed=790,
    unhashed={"request_not_json": 10},
    prompt_counts_checked=700,
    prompt_counts_matched=699,
    dropped={"trace_unwritable": 2},
    segments=3,
    uploaded=2,
    upload_failed=1,
    numbers=record_numbers(),
)


def tap_stats(**changes: Any) -> TapStats:
    """Of a tap that serves and records."""
    stats = TapStats(
        upstreams=[UPSTREAM],
        reachable={UPSTREAM: True},
        workers=2,
        workers_up=2,
        recorder_up=True,
        offered=900,
        dropped={"queue_full": 6, "trace_unwritable": 2},
        worker_stats=[worker_stats()],
        progress=PROGRESS,
    )
    return replace(stats, **changes)
