"""Rows of a request log as exchanges: bodies that clients sent, and as much as the log has of responses and times.

A row is an object a line. It is the body of a request, an array of messages, a line of OpenAI's batches, or a gateway's
row with the body in one of ``BODIES`` and further columns by the names below.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tap.ipc.messages import Endpoint, ExchangeCopy
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
"""Between rows of a log without times."""


@dataclass(slots=True)
class LogRows:
    """Rows of a log in order; ``endpoint`` is the API of rows that do not name theirs, null: told by their keys."""

    path: Path
    endpoint: Endpoint | None = None
    has_times: bool | None = None
    """Null: no row was read yet."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Rows that are no request, by reason."""

    def __iter__(self) -> Iterator[ExchangeCopy]:
        count = 0
        last_ns = 0
        with LineReader(self.path) as lines:
            for line in lines:
                where = f"{self.path}:{lines.number}"
                found = _parsed(line, where)
                start_ns = _moment(found, STARTS, where) if isinstance(found, dict) else None
                self._check_times(start_ns is not None, where)
                exchange = self._exchange(found, count * STEP_NS if start_ns is None else start_ns, where)
                count += 1
                if exchange is None:
                    continue
                if exchange.arrival_ns < last_ns:
                    raise InputError(f"{where}: earlier than the row before; expected rows by time: sort the log first")
                last_ns = exchange.arrival_ns
                yield exchange

    def _check_times(self, has_time: bool, where: str) -> None:
        if self.has_times is None:
            self.has_times = has_time
        if self.has_times != has_time:
            there = "has no time" if self.has_times else "has a time"
            raise InputError(f"{where}: {there}, unlike the rows before; expected times in all rows or in none")

    def _exchange(self, found: Any, start_ns: int, where: str) -> ExchangeCopy | None:
        body = _body(found, where)
        if body is None:
            self._leave_out("no request body")
            return None
        row: Mapping[str, Any] = found if isinstance(found, dict) else {}
        endpoint = self._endpoint(row, body)
        if endpoint is None:
            self._leave_out("no prompt, messages or input")
            return None
        status, response = _response(row, where)
        end_ns = _end_ns(row, start_ns, where)
        return ExchangeCopy(
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
        named = first_value(row, PATHS)
        if isinstance(named, str) and "/v1/" in (path := urlsplit(named).path):
            return "/v1/" + path.rpartition("/v1/")[2].strip("/")
        return self.endpoint or _endpoint_by_keys(body)

    def _leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def _parsed(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except NOT_JSON as error:
        raise InputError(f"{where}: not JSON ({error}); expected {EXPECTED}") from None


def _body(found: Any, where: str) -> dict[str, Any] | None:
    """Body of a row's request; null: it has none."""
    if isinstance(found, list):
        return {"messages": found}
    if not isinstance(found, dict):
        raise InputError(f"{where}: a JSON {type(found).__name__}; expected {EXPECTED}")
    if _endpoint_by_keys(found) is not None:
        return found
    body = first_value(found, BODIES)
    if isinstance(body, str):
        body = _parsed(body.encode(), f"{where}: body")
    return body if isinstance(body, dict) else None


def _endpoint_by_keys(body: Mapping[str, Any]) -> Endpoint | None:
    """API of a body: Anthropic's has its system prompt beside the messages."""
    if isinstance(body.get("messages"), list):
        return "/v1/messages" if "system" in body or "anthropic_version" in body else "/v1/chat/completions"
    if "prompt" in body:
        return "/v1/completions"
    return "/v1/responses" if "input" in body else None


def _response(row: Mapping[str, Any], where: str) -> tuple[int | None, dict[str, Any] | None]:
    """Status and body of a row's response, null where it has none; of a batch's output both are in ``response``."""
    status = first_value(row, STATUSES)
    response = first_value(row, RESPONSES)
    if isinstance(response, str):
        response = _parsed(response.encode(), f"{where}: response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        status, response = response.get("status_code", status), response["body"]
    code = int(status) if isinstance(status, int | str) and str(status).isdigit() else None
    return code, response if isinstance(response, dict) else None


def _headers(row: Mapping[str, Any]) -> dict[str, str]:
    """Headers that the tap would have kept, of the row's ids."""
    named = {"x-request-id": first_value(row, IDS), "x-session-id": first_value(row, SESSIONS)}
    return {name: str(value) for name, value in named.items() if isinstance(value, str | int)}


def _end_ns(row: Mapping[str, Any], start_ns: int, where: str) -> int:
    end_ns = _moment(row, ENDS, where)
    took_ms = first_value(row, DURATIONS_MS)
    if end_ns is None and isinstance(took_ms, int | float):
        end_ns = start_ns + round(took_ms * 1e6)
    if end_ns is not None and end_ns < start_ns:
        raise InputError(f"{where}: ends before it starts; expected a later end")
    return start_ns if end_ns is None else end_ns


def _moment(row: Mapping[str, Any], names: Sequence[str], where: str) -> int | None:
    """Nanoseconds since 1970; a number is in seconds, ms, µs or ns, whichever makes it a date after 1973."""
    value = first_value(row, names)
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InputError(f"{where}: {value!r}; expected a time as 2026-11-22T10:00:00Z") from None
        value = round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1e6)
    if not isinstance(value, int | float):
        raise InputError(f"{where}: {names[0]}: {value!r}; expected a time")
    unit = next((10**power for power in (9, 6, 3) if value < 10 ** (20 - power)), 1)
    return round(value * unit)
