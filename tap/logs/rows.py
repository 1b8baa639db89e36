"""Rows of a request log as exchanges: request bodies, and responses and times if the log has them.

Each line is a JSON value: a request body, an array of messages, a line of OpenAI's batch files, or a gateway's row with
the body in one of ``BODIES`` and further columns by the names below.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tap.ipc.messages import CapturedExchange, Endpoint
from tracefile.records.decoding import NOT_JSON, first_value
from tracefile.records.errors import InputError
from tracefile.storage.lines import LineReader

BODIES = ("body", "request_json", "request_body", "request")
RESPONSES = ("response_json", "response_body", "response")
PATHS = ("url", "path", "endpoint")
STARTS = ("timestamp", "ts", "start_time", "startTime", "request_time", "created_at", "time")
ENDS = ("end_time", "endTime", "completed_at")
DURATIONS_MS = ("latency_ms", "duration_ms", "response_time_ms", "e2e_ms")
STATUSES = ("status_code", "http_status")
IDS = ("request_id", "custom_id", "id")
SESSIONS = ("session_id", "conversation_id")
EXPECTED = "a request body, an array of messages, or an object with one of " + ", ".join(BODIES)
STEP_NS = 10**9
"""Distance of rows of a log without times."""


@dataclass(slots=True)
class LogRows:
    """Rows of a log, in order. ``endpoint``: API of rows without a path; None: detected by the body's keys."""

    path: Path
    endpoint: Endpoint | None = None
    has_times: bool | None = None
    """True if rows have times. None: no row was read yet."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows without a request, by reason."""

    def __iter__(self) -> Iterator[CapturedExchange]:
        count = 0
        last_ns = 0
        with LineReader(self.path) as lines:
            for line in lines:
                location = f"{self.path}:{lines.number}"
                row_value = _parsed(line, location)
                start_ns = _timestamp_ns(row_value, STARTS, location) if isinstance(row_value, dict) else None
                self._check_times(start_ns is not None, location)
                exchange = self._exchange(row_value, count * STEP_NS if start_ns is None else start_ns, location)
                count += 1
                if exchange is None:
                    continue
                if exchange.arrival_ns < last_ns:
                    raise InputError(f"{location}: earlier than the previous row; expected a log sorted by time")
                last_ns = exchange.arrival_ns
                yield exchange

    def _check_times(self, has_time: bool, location: str) -> None:
        if self.has_times is None:
            self.has_times = has_time
        if self.has_times != has_time:
            presence = "has no time" if self.has_times else "has a time"
            raise InputError(f"{location}: {presence}, unlike the rows before; expected times in all rows or in none")

    def _exchange(self, row_value: Any, start_ns: int, location: str) -> CapturedExchange | None:
        body = _body(row_value, location)
        if body is None:
            self._skip("no request body")
            return None
        row: Mapping[str, Any] = row_value if isinstance(row_value, dict) else {}
        endpoint = self._endpoint(row, body)
        if endpoint is None:
            self._skip("no prompt, messages or input")
            return None
        status, response = _response(row, location)
        end_ns = _end_ns(row, start_ns, location)
        return CapturedExchange(
            endpoint=endpoint,
            arrival_ns=start_ns,
            end_ns=end_ns,
            concurrency=1,
            request_headers=_headers(row),
            request_body=[msgspec.json.encode(body)],
            http_status=status if status is not None or response is None else 200,
            response_headers={"content-type": "application/json"},
            response_reads=[] if response is None else [(end_ns, msgspec.json.encode(response))],
        )

    def _endpoint(self, row: Mapping[str, Any], body: Mapping[str, Any]) -> Endpoint | None:
        ids = first_value(row, PATHS)
        if isinstance(ids, str) and "/v1/" in (path := urlsplit(ids).path):
            return "/v1/" + path.rpartition("/v1/")[2].strip("/")
        return self.endpoint or _endpoint_by_keys(body)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def _parsed(line: bytes, location: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except NOT_JSON as error:
        raise InputError(f"{location}: not JSON ({error}); expected {EXPECTED}") from None


def _body(row_value: Any, location: str) -> dict[str, Any] | None:
    if isinstance(row_value, list):
        return {"messages": row_value}
    if not isinstance(row_value, dict):
        raise InputError(f"{location}: a JSON {type(row_value).__name__}; expected {EXPECTED}")
    if _endpoint_by_keys(row_value) is not None:
        return row_value
    body = first_value(row_value, BODIES)
    if isinstance(body, str):
        body = _parsed(body.encode(), f"{location}: body")
    return body if isinstance(body, dict) else None


def _endpoint_by_keys(body: Mapping[str, Any]) -> Endpoint | None:
    """Return the API of a body by its keys: Anthropic's has the system prompt outside the messages."""
    if isinstance(body.get("messages"), list):
        return "/v1/messages" if "system" in body or "anthropic_version" in body else "/v1/chat/completions"
    if "prompt" in body:
        return "/v1/completions"
    return "/v1/responses" if "input" in body else None


def _response(row: Mapping[str, Any], location: str) -> tuple[int | None, dict[str, Any] | None]:
    """Return status and body of a row's response; None: absent. In batch output files, both are in ``response``."""
    status = first_value(row, STATUSES)
    response = first_value(row, RESPONSES)
    if isinstance(response, str):
        response = _parsed(response.encode(), f"{location}: response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        status, response = response.get("status_code", status), response["body"]
    code = int(status) if isinstance(status, int | str) and str(status).isdigit() else None
    return code, response if isinstance(response, dict) else None


def _headers(row: Mapping[str, Any]) -> dict[str, str]:
    ids = {"x-request-id": first_value(row, IDS), "x-session-id": first_value(row, SESSIONS)}
    return {name: str(value) for name, value in ids.items() if isinstance(value, str | int)}


def _end_ns(row: Mapping[str, Any], start_ns: int, location: str) -> int:
    end_ns = _timestamp_ns(row, ENDS, location)
    duration_ms = first_value(row, DURATIONS_MS)
    if end_ns is None and isinstance(duration_ms, int | float):
        end_ns = start_ns + round(duration_ms * 1e6)
    if end_ns is not None and end_ns < start_ns:
        raise InputError(f"{location}: ends before it starts; expected a later end")
    return start_ns if end_ns is None else end_ns


def _timestamp_ns(row: Mapping[str, Any], names: Sequence[str], location: str) -> int | None:
    """Return ns since 1970. Numbers are in s, ms, µs or ns: the unit that gives a date after 1973."""
    value = first_value(row, names)
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InputError(f"{location}: {value!r}; expected a time as 2026-11-22T10:00:00Z") from None
        value = round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1e6)
    if not isinstance(value, int | float):
        raise InputError(f"{location}: {names[0]}: {value!r}; expected a time")
    unit = next((10**power for power in (9, 6, 3) if value < 10 ** (20 - power)), 1)
    return round(value * unit)
