"""Predicted record of a request: latencies, tokens, cached tokens, preemptions. mypyc compiles this module."""

from functools import cache
from typing import Any, Final

import msgspec

from sim.engine.gap_json import GapTexts
from sim.engine.simulatedrequest import (
    ABORTED,
    AS_RECORDED,
    LOST,
    NO_ENGINE,
    PARENT_FAILED,
    UNSERVABLE,
    SimulatedRequest,
)
from sim.vllm.request import NOT_ADMITTED
from tracefile.records.schema import Record

TOO_LONG: Final = "exceeds_engine"
BY_FLEET: Final = {LOST: "engine_died", NO_ENGINE: "no_engine"}
FAILURES: Final = {UNSERVABLE: TOO_LONG, PARENT_FAILED: "parent_failed", NO_ENGINE: BY_FLEET[NO_ENGINE]}
"""Errors by outcome, of failures in the fleet and of requests that no engine served."""


def predict(
    record: Record, request: SimulatedRequest, times: list[float | None], texts: GapTexts, block_size: int
) -> None:
    """Fill a record with its request's predicted latencies and tokens. ``times``: arrival, E2E latency, TTFT, queue
    time and think time, in ms."""
    record.arrival_ms, record.e2e_ms, ttft_ms, queue_ms, think_ms = times
    record.scheduled_ms = record.first_byte_ms = record.ttft_ms = record.output_tokens = record.cached_tokens = None
    record.itl_ms, record.itl_tokens, record.extra = [], [], {}
    if think_ms is not None:
        record.think_ms = think_ms
    outcome = request.outcome
    if outcome == AS_RECORDED:
        return
    if outcome in FAILURES or not request.has_arrived:
        record.status, record.error = "error", FAILURES[outcome]
        record.http_status = record.finish_reason = None
        return
    tokens = request.num_delivered
    if outcome in (ABORTED, LOST):
        record.finish_reason = record.kv_blocks = None
        if outcome == LOST:
            record.status, record.http_status, record.error = "upstream_abort", 200, BY_FLEET[LOST]
    else:
        record.status, record.http_status, record.error = "ok", 200, None
        record.finish_reason = record.finish_reason or "length"
        record.kv_blocks = -(-(request.prompt_tokens + tokens - 1) // block_size)
    if record.stream is not False and ttft_ms is not None:
        record.ttft_ms = ttft_ms
        if tokens > 1:
            request.close_run()
            gaps: Any = msgspec.Raw(texts.array(request.token_runs))
            record.itl_ms, record.itl_tokens = gaps, _single_tokens(tokens - 1)
    record.output_tokens = tokens
    record.cached_tokens = None if request.cached_tokens == NOT_ADMITTED else request.cached_tokens
    record.queue_ms = queue_ms
    record.preemptions = request.preemptions


@cache
def _single_tokens(count: int) -> Any:
    return msgspec.Raw(b"[" + b"1," * (count - 1) + b"1]")
