"""What the tap's processes could have told an admin process: made-up numbers that tests know."""

from typing import Any

import msgspec

from measure.histogram import GAP_S, OVERHEAD_S, WAIT_S, add_value, empty_counts
from tap.ipc.exchange import Progress, ServiceStats
from tap.ipc.feed import RecorderStats, RequestCount, UpstreamStats, WorkerStats
from tracefile.records.schema import Engine

BLOCK = 16


def service_stats(upstream: str = "http://127.0.0.1:9", **changes: Any) -> ServiceStats:
    engine = Engine(name="vllm", version="0.32.0", block_size=BLOCK, num_gpu_blocks=4_001)
    stats = ServiceStats(
        upstreams=[upstream],
        workers=2,
        workers_up=2,
        engine=engine,
        offered=900,
        dropped={"queue_full": 6, "trace_unwritable": 2},
    )
    return msgspec.structs.replace(stats, **changes)


def worker_stats(number: int = 0, **changes: Any) -> WorkerStats:
    chunk = empty_counts(OVERHEAD_S)
    for microseconds in (12, 14, 18, 25, 90):
        add_value(chunk, OVERHEAD_S, microseconds * 1e-6)
    stats = WorkerStats(
        worker=number,
        pid=100 + number,
        in_flight=7,
        connections=12,
        relayed=1_000,
        bytes_in=5_000_000,
        bytes_out=70_000_000,
        queue_bytes=120_000,
        queue_limit_bytes=128 << 20,
        loop_delay_s=0.0014,
        chunk=chunk,
        upstreams=[UpstreamStats("http://127.0.0.1:9", 400 + number, 3, False, 1, 8_192, 6_144)],
        misrouted={"raises": 2},
    )
    return msgspec.structs.replace(stats, **changes)


def recorder_stats(**changes: Any) -> RecorderStats:
    ttft, gaps, head = empty_counts(WAIT_S), empty_counts(GAP_S), empty_counts(OVERHEAD_S)
    for value in (0.03, 0.07, 0.4):
        add_value(ttft, WAIT_S, value)
        add_value(gaps, GAP_S, value / 10)
        add_value(head, OVERHEAD_S, value / 1e3)
    stats = RecorderStats(
        pid=99,
        progress=Progress(
            received=889,
            recorded=800,
            hashed=790,
            unhashed={"request_not_json": 10},
            prompt_counts_checked=700,
            prompt_counts_matched=699,
            sampled_out=80,
            dropped={"trace_unwritable": 2},
            segments=3,
            uploaded=2,
            upload_failed=1,
        ),
        requests=[
            RequestCount("/v1/chat/completions", "ok", 200, "http://127.0.0.1:9", 780),
            RequestCount("/v1/chat/completions", "client_abort", 200, "http://127.0.0.1:9", 15),
            RequestCount("/v1/completions", "error", 429, "http://127.0.0.1:9", 5),
        ],
        ttft=ttft,
        gaps=gaps,
        request_head=head,
        prompt_tokens=2_000_000,
        cached_tokens=1_500_000,
        output_tokens=150_000,
    )
    return msgspec.structs.replace(stats, **changes)
