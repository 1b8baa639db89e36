"""Dynamo's request traces, ``dynamo.request.trace.v1``: a line an event, in finish order, plain or in an envelope.

Source: ai-dynamo's request tracing (1.6), record ``request_end``. Hashes are of chained blocks of
``trace_block_size`` tokens, one for every started block; that of a partial last block is kept in ``extra``. Payload
events hold prompts and are dropped on sight; tool events have no place here. Both are counted.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from tracefile.importers.blocktraces import PARTIAL_BLOCK, split_ids
from tracefile.importers.wallclock import elapsed, midnight_ns
from tracefile.records.decoding import convert_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import (
    BlockHash,
    Count,
    HashInfo,
    Meta,
    Ordinal,
    Record,
    RequestId,
    SessionId,
    Status,
    Time,
)

DYNAMO_SCHEMA = "dynamo.request.trace.v1"
STATUS_OF_FINISH: dict[str, Status] = {"error": "error", "cancelled": "client_abort"}
KEPT = ("x_request_id", "avg_itl_ms", "kv_hit_rate", "prefill_time_ms", "queue_depth", "worker")
"""Fields of a request that have no place in the schema, kept in ``extra``."""


class DynamoReplay(msgspec.Struct, kw_only=True):
    """Prompt of a request, as replay needs it."""

    trace_block_size: Ordinal
    input_length: Count
    input_sequence_hashes: list[int]


class DynamoFinish(msgspec.Struct, kw_only=True):
    """End of a request."""

    finish_reason: str | None = None


class DynamoRequest(msgspec.Struct, kw_only=True):
    """Measurements of a request."""

    request_id: str
    model: str | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    request_received_ms: Time | None = None
    prefill_wait_time_ms: Time | None = None
    ttft_ms: Time | None = None
    total_time_ms: Time | None = None
    replay: DynamoReplay | None = None
    finish_reason_metadata: DynamoFinish | None = None
    extra: dict[str, Any] = {}


class DynamoContext(msgspec.Struct, kw_only=True):
    """Agent that sent a request."""

    session_id: str
    parent_session_id: str | None = None


class DynamoEvent(msgspec.Struct, kw_only=True):
    """Line of a trace."""

    event_type: str
    event_time_unix_ms: Time | None = None
    agent_context: DynamoContext | None = None
    request: dict[str, Any] | None = None


@dataclass(slots=True)
class Ended:
    """Request of a session that ended last."""

    request_id: RequestId
    turn: int
    end_ms: float


def event_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a line, out of its sink's envelope if it is in one."""
    event = found.get("event")
    return event if isinstance(event, dict) and "schema" in event else found


def is_dynamo(found: dict[str, Any]) -> bool:
    """Return whether a line is an event of a Dynamo request trace; a payload's says no schema."""
    event = event_of(found)
    return event.get("schema") == DYNAMO_SCHEMA or event.get("event_type") == "request_payload"


class DynamoDecoder:
    """Events as records: a ``request_end`` is one, any other none. t = 0 is the midnight before the first."""

    def __init__(self) -> None:
        self.meta = Meta()
        self._zero_ms: float | None = None
        self._left_out: Counter[str] = Counter()
        self._sessions: dict[str, Ended] = {}

    @property
    def warnings(self) -> list[str]:
        return [f"{count} {kind} events dropped" for kind, count in sorted(self._left_out.items())]

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        event = convert_object(event_of(parse_object(line, where)), DynamoEvent, where)
        if event.event_type != "request_end" or event.request is None:
            self._left_out[event.event_type] += 1
            return []
        request = convert_object(event.request, DynamoRequest, f"{where}: request")
        received_ms, e2e_ms = _times(event.event_time_unix_ms, request, where)
        if self._zero_ms is None:
            self._begin(received_ms, request.replay)
        assert self._zero_ms is not None
        record = self._record(request, where)
        record.arrival_ms, record.e2e_ms = received_ms - self._zero_ms, e2e_ms
        if event.agent_context is not None:
            self._link(record, event.agent_context)
        return [record]

    def _begin(self, first_ms: float, replay: DynamoReplay | None) -> None:
        zero_ns = midnight_ns(round(first_ms * 1e6))
        self._zero_ms = zero_ns / 1e6
        self.meta = Meta(
            block_size=None if replay is None else replay.trace_block_size,
            hash=None if replay is None else HashInfo(algorithm="dynamo"),
            epoch_unix_ns=zero_ns,
        )

    def _record(self, request: DynamoRequest, where: str) -> Record:
        finish = request.finish_reason_metadata
        reason = None if finish is None else finish.finish_reason
        extra: dict[str, Any] = {name: request.extra[name] for name in KEPT if request.extra.get(name) is not None}
        hashes, partial = self._hashes(request.replay, where)
        if partial:
            extra[PARTIAL_BLOCK] = partial[0]
        replay_tokens = None if request.replay is None else request.replay.input_length
        return Record(
            request_id=RequestId(request.request_id),
            ttft_ms=request.ttft_ms,
            queue_ms=request.prefill_wait_time_ms,
            status=STATUS_OF_FINISH.get(reason or "", "ok"),
            finish_reason=reason,
            model=request.model,
            prompt_tokens=replay_tokens if request.input_tokens is None else request.input_tokens,
            output_tokens=request.output_tokens,
            cached_tokens=request.cached_tokens,
            tokens_source="usage",
            block_hashes=hashes,
            hash_source=None if hashes is None else "engine",
            extra=extra,
        )

    def _hashes(self, replay: DynamoReplay | None, where: str) -> tuple[list[BlockHash] | None, list[int]]:
        if replay is None:
            return None, []
        if replay.trace_block_size != self.meta.block_size:
            raise InputError(
                f"{where}: replay.trace_block_size: {replay.trace_block_size}; "
                f"expected {self.meta.block_size}, as in the trace's first record"
            )
        name = "replay.input_sequence_hashes"
        ids, rest = split_ids(replay.input_sequence_hashes, replay.input_length, replay.trace_block_size, where, name)
        return [BlockHash(found) for found in ids], rest

    def _link(self, record: Record, context: DynamoContext) -> None:
        """Set the record's session; its parent is the session's last request that had ended by then."""
        before = self._sessions.get(context.session_id)
        continues = before is not None and record.arrival_ms is not None and before.end_ms <= record.arrival_ms
        record.session_id = SessionId(context.session_id)
        record.session_source = "explicit"
        record.turn = before.turn + 1 if before is not None and continues else 1
        if before is not None and continues and record.arrival_ms is not None:
            record.parent_id = before.request_id
            record.think_ms = record.arrival_ms - before.end_ms
        if context.parent_session_id is not None:
            record.extra["parent_session_id"] = context.parent_session_id
        end_ms = record.end_ms()
        if end_ms is not None and (before is None or end_ms >= before.end_ms):
            self._sessions[context.session_id] = Ended(record.request_id, record.turn, end_ms)


def _times(end_ms: float | None, request: DynamoRequest, where: str) -> tuple[float, float | None]:
    """Arrival and duration; of an arrival, a duration and an end, two are enough. Raises InputError."""
    received_ms, e2e_ms = request.request_received_ms, request.total_time_ms
    if received_ms is not None:
        return received_ms, elapsed(received_ms, end_ms) if e2e_ms is None else e2e_ms
    if end_ms is None or e2e_ms is None:
        raise InputError(
            f"{where}: request.request_received_ms: missing; expected it, or event_time_unix_ms and a total"
        )
    return end_ms - e2e_ms, e2e_ms
