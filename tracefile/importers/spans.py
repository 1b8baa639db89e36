"""OpenTelemetry spans of generative AI: OTLP as JSON (a file exporter's lines, or one object), or a span a line.

Source: the semantic conventions ``gen_ai.*`` (1.3x and the older names), and vLLM's own ``gen_ai.latency.*`` in
seconds. A span is a request if it tells prompt and output tokens. Its messages, if it has some, are dropped on sight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracefile.importers.wallclock import checked_ns, elapsed, iso_unix_ns, midnight_ns
from tracefile.records.decoding import first_told, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, Meta, Record, RequestId, SessionId

INPUT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
CACHED_TOKENS = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cached_tokens")
SESSION = ("gen_ai.conversation.id", "session.id")
MODEL = ("gen_ai.response.model", "gen_ai.request.model")
REQUEST = ("gen_ai.response.id", "gen_ai.request.id")
TTFT_S = ("gen_ai.server.time_to_first_token", "gen_ai.latency.time_to_first_token")
QUEUE_S = ("gen_ai.latency.time_in_queue",)
FAILED = 2
"""Code of a span's status."""
_WHOLE = re.compile(r"-?[0-9]{1,19}")

Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Span of either shape."""

    span_id: str
    start_ns: int
    end_ns: int | None
    attributes: Attributes
    failed: bool


def is_spans(found: dict[str, Any]) -> bool:
    """Return whether a line, or a file's object, holds spans."""
    return "resourceSpans" in found or (
        "attributes" in found and ("start_time" in found or "startTimeUnixNano" in found)
    )


class SpansDecoder:
    """Spans as records, in the file's order; t = 0 is the midnight before the first that is a request."""

    def __init__(self) -> None:
        self.meta = Meta()
        self._zero_ns: int | None = None
        self._others = 0
        self._with_content = 0

    @property
    def warnings(self) -> Sequence[str]:
        found = []
        if self._others:
            found.append(f"{self._others} spans tell no prompt and output tokens: no requests, left out")
        if self._with_content:
            found.append(f"messages of {self._with_content} spans dropped: they are content")
        return found

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        return [record for span in _spans(parse_object(line, where), where) for record in self._records(span, where)]

    def _records(self, span: Span, where: str) -> Iterator[Record]:
        told = span.attributes
        prompt, output = _count(told, INPUT_TOKENS, where), _count(told, OUTPUT_TOKENS, where)
        if prompt is None or output is None:
            self._others += 1
            return
        self._with_content += any(name.endswith((".messages", ".prompt", ".completion")) for name in told)
        if self._zero_ns is None:
            self._zero_ns = midnight_ns(span.start_ns)
            self.meta = Meta(epoch_unix_ns=self._zero_ns)
        session = first_told(told, SESSION)
        reasons = told.get("gen_ai.response.finish_reasons")
        taken_ns = elapsed(span.start_ns, span.end_ns)
        yield Record(
            request_id=RequestId(str(first_told(told, REQUEST) or span.span_id)),
            session_id=None if session is None else SessionId(str(session)),
            session_source=None if session is None else "explicit",
            arrival_ms=(span.start_ns - self._zero_ns) / 1e6,
            ttft_ms=_ms(told, TTFT_S, where),
            queue_ms=_ms(told, QUEUE_S, where),
            # A span that was given no end has its start's.
            e2e_ms=taken_ns / 1e6 if taken_ns else None,
            status="error" if span.failed else "ok",
            finish_reason=str(reasons[0]) if isinstance(reasons, list) and reasons else None,
            model=_text(first_told(told, MODEL)),
            max_tokens=_count(told, ("gen_ai.request.max_tokens",), where),
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=_count(told, CACHED_TOKENS, where),
            tokens_source="usage",
        )


def _spans(found: dict[str, Any], where: str) -> Iterator[Span]:
    """Spans of a line, whatever shape it has; raises InputError."""
    if "resourceSpans" not in found:
        yield _span(found, where)
        return
    try:
        spans = [
            span
            for resource in found["resourceSpans"]
            for scope in resource.get("scopeSpans", ())
            for span in scope.get("spans", ())
        ]
    except (TypeError, AttributeError):
        raise InputError(f"{where}: resourceSpans: not as OTLP writes them; expected scopeSpans with spans") from None
    for span in spans:
        yield _span(span, where)


def _span(found: Any, where: str) -> Span:
    if not isinstance(found, dict):
        raise InputError(f"{where}: spans: {type(found).__name__}; expected a span's object")
    start, end = (found.get(new, found.get(old)) for new, old in (
        ("startTimeUnixNano", "start_time"),
        ("endTimeUnixNano", "end_time"),
    ))  # fmt: skip
    status = found.get("status")
    code = status.get("code", status.get("status_code")) if isinstance(status, dict) else None
    context = found.get("context")
    own = found.get("spanId") or (context.get("span_id") if isinstance(context, dict) else None)
    start_ns = _unix_ns(start, f"{where}: start")
    return Span(
        span_id=str(own or f"span-{start_ns}"),
        start_ns=start_ns,
        end_ns=None if end is None else _unix_ns(end, f"{where}: end"),
        attributes=_attributes(found.get("attributes"), where),
        failed=code in (FAILED, "ERROR", "STATUS_CODE_ERROR"),
    )


def _attributes(found: Any, where: str) -> Attributes:
    """Attributes by name, of OTLP's list of keys and typed values or of a plain object."""
    if isinstance(found, dict):
        return found
    if not isinstance(found, list):
        raise InputError(f"{where}: attributes: {type(found).__name__}; expected a span's attributes")
    return {str(item.get("key")): _value(item.get("value")) for item in found if isinstance(item, dict)}


def _value(typed: Any) -> Any:
    """Plain value of OTLP's ``{"intValue": "12"}``."""
    if not isinstance(typed, dict) or len(typed) != 1:
        return None
    ((kind, value),) = typed.items()
    if kind == "arrayValue":
        values = value.get("values") if isinstance(value, dict) else None
        return [_value(item) for item in values] if isinstance(values, list) else []
    return int(value) if kind == "intValue" and _is_whole(value) else value


def _is_whole(text: Any) -> bool:
    """Return whether a text is a whole number of 64 bits in digits."""
    return isinstance(text, str) and bool(_WHOLE.fullmatch(text))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _count(told: Attributes, names: Sequence[str], where: str) -> int | None:
    value = first_told(told, names)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise InputError(f"{where}: {names[0]}: {value!r}; expected a whole number up to {MOST_TOKENS:,}")
    return value


def _ms(told: Attributes, names: Sequence[str], where: str) -> float | None:
    """Milliseconds of an attribute in seconds."""
    value = first_told(told, names)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise InputError(f"{where}: {names[0]}: {value!r}; expected seconds")
    return value * 1000


def _unix_ns(at: Any, where: str) -> int:
    """Nanoseconds since 1970, of OTLP's number or of ISO 8601."""
    return checked_ns(int(at), where) if isinstance(at, int) or _is_whole(at) else iso_unix_ns(at, where)
