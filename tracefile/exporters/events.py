"""Traces of events with their times: Dynamo's request traces, and OpenTelemetry spans as OTLP's JSON.

The formats are those of the importers of the same names. Spans hold no content and no hashes.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import xxhash

from tracefile.exporters.blocklines import BlockIds
from tracefile.exporters.loss import Loss, with_arrivals, with_lengths
from tracefile.importers.dynamo import DYNAMO_SCHEMA, KEPT
from tracefile.records.schema import Meta, Record

SPANS_A_LINE = 500


def dynamo_lines(records: Iterable[Record], meta: Meta, ids: BlockIds, loss: Loss) -> Iterator[bytes]:
    """``request_end`` events in finish order. Where the first request has a session, every request gets one."""
    with_sessions: bool | None = None
    for record in with_arrivals(with_lengths(records, loss), loss):
        if with_sessions is None:
            with_sessions = record.session_id is not None
        if not record.output_tokens or not record.prompt_tokens:
            loss.left_out["no prompt, or no output"] += 1
            continue
        loss.kept += 1
        _note_end(record, loss)
        event: dict[str, Any] = {
            "schema": DYNAMO_SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": _unix_ms(meta, record.end_ms() or record.arrival_ms or 0.0),
            "event_source": "dynamo",
        }
        if with_sessions:
            context = {"session_id": record.session_id or record.request_id}
            parent = record.extra.get("parent_session_id")
            event["agent_context"] = context | ({} if parent is None else {"parent_session_id": parent})
        elif record.session_id is not None:
            loss.changed["lose their session: the first request has none"] += 1
        event["request"] = _dynamo_request(record, meta, ids)
        yield msgspec.json.encode(event) + b"\n"


def _note_end(record: Record, loss: Loss) -> None:
    if record.e2e_ms is None:
        loss.changed["have no end (e2e_ms): they end as they arrive"] += 1


def _dynamo_request(record: Record, meta: Meta, ids: BlockIds) -> dict[str, Any]:
    told = {
        "request_id": record.request_id,
        "model": record.model or meta.model,
        "input_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "request_received_ms": _unix_ms(meta, record.arrival_ms or 0.0),
        "prefill_wait_time_ms": record.queue_ms,
        "ttft_ms": record.ttft_ms,
        "total_time_ms": record.e2e_ms,
        **{name: record.extra.get(name) for name in KEPT},
        "replay": {
            "trace_block_size": ids.block_size,
            "input_length": record.prompt_tokens,
            "input_sequence_hashes": ids.of(record),
        },
        "finish_reason_metadata": None if record.finish_reason is None else {"finish_reason": record.finish_reason},
    }
    return {name: value for name, value in told.items() if value is not None}


def _unix_ms(meta: Meta, at_ms: float) -> int:
    return round((meta.epoch_unix_ns or 0) / 1e6 + at_ms)


def otlp_lines(records: Iterable[Record], meta: Meta, loss: Loss) -> Iterator[bytes]:
    """Export requests of OTLP, some hundred spans a line."""
    usable = with_arrivals(with_lengths(records, loss), loss)
    while part := list(islice(usable, SPANS_A_LINE)):
        for record in part:
            _note_end(record, loss)
        some = [_span(record, meta) for record in part]
        loss.kept += len(some)
        scope = {"scope": {"name": "kvtape"}, "spans": some}
        resource = {"attributes": _attributes({"service.name": "kvtape"})}
        yield msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}) + b"\n"


def _span(record: Record, meta: Meta) -> dict[str, Any]:
    start_ns = (meta.epoch_unix_ns or 0) + round((record.arrival_ms or 0.0) * 1e6)
    chat = (record.endpoint or "").endswith(("/chat/completions", "/messages", "/responses"))
    operation = "chat" if chat else "text_completion"
    model = record.model or meta.model
    told = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": None if record.finish_reason is None else [record.finish_reason],
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.server.time_to_first_token": _seconds(record.ttft_ms),
        "gen_ai.latency.time_in_queue": _seconds(record.queue_ms),
        "error.type": record.error,
    }
    return {
        "traceId": _hex(f"trace {record.session_id or record.request_id}", 32),
        "spanId": _hex(f"span {record.request_id}", 16),
        "name": operation if model is None else f"{operation} {model}",
        "kind": 3,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + round((record.e2e_ms or 0.0) * 1e6)),
        "attributes": _attributes(told),
        "status": {"code": 2 if record.status in ("error", "upstream_abort", "timeout") else 0},
    }


def _attributes(told: dict[str, Any]) -> list[dict[str, Any]]:
    """OTLP's list of keys and typed values."""
    return [{"key": name, "value": _typed(value)} for name, value in told.items() if value is not None]


def _typed(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_typed(item) for item in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _hex(name: str, digits: int) -> str:
    return xxhash.xxh3_128_hexdigest(name.encode())[:digits]
