"""Removal of injected usage and token ids from a response stream, by cutting bytes; JSON is never re-encoded.

The filter works event by event. Without injection, vLLM writes ``null`` for token ids, so the filter leaves ``null``.
Data in any other form than the expected JSON passes unchanged.
"""

import re
from itertools import islice

import msgspec

from engines.dialect import DialectName
from tap.ipc.settings import Injection
from wire.jsonsize import fits_in_memory

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA_LINE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|\n)data:(?: ?)([^\r\n]*)")
BARE_CRS = b"\r\r"
"""Event end that the SSE standard allows and no engine writes: such a stream passes unfiltered."""


class EventSplitter:
    """Splits a token stream, read by read, into complete events."""

    __slots__ = ("_buffer", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that end within ``data``, each with its empty line; buffer the incomplete event."""
        if not self._buffer and is_single_event(data):
            return [data]
        events, buffer, begin = [], self._buffer, 0
        buffer += data
        while (end := _EVENT_END.search(buffer, max(begin, self._searched))) is not None:
            events.append(bytes(buffer[begin : end.end()]))
            begin = end.end()
        del buffer[:begin]
        self._searched = max(0, len(buffer) - 3)
        return events

    def flush(self) -> bytes:
        buffer, self._buffer, self._searched = bytes(self._buffer), bytearray(), 0
        return buffer


def is_single_event(data: bytes) -> bool:
    """Return whether ``data`` is one event of one line, as for nearly all reads of a token stream."""
    return data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2 and b"\r" not in data


def data_span(event: bytes) -> tuple[int, int] | None:
    """Return the span of an event's data line, as engines write it; None: no data line, or several."""
    if event.startswith(b"data: ") and is_single_event(event):
        return 6, len(event) - 2
    lines = list(islice(_DATA_LINE.finditer(event), 2))
    return lines[0].span(1) if len(lines) == 1 else None


MAX_EVENT_BYTES = 32 << 20
"""Limit of a buffered event; after a longer event the stream passes unfiltered."""

_ABSENT = msgspec.Raw()
_NULL = b"null"


class _Choice(msgspec.Struct):
    """Raw JSON members of a choice that the filter inspects."""

    delta: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    finish_reason: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


class _Event(msgspec.Struct):
    """Raw JSON members of an event that the filter inspects: choices, usage, prompt token ids."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Event).decode

# A quote inside a JSON string is escaped, so these patterns match members of such names only, at any depth.
_IDS = re.compile(rb'token_ids"\s*:\s*\[[\d,\s]*\]')
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')


class ResponseFilter:
    """Filter that removes injected usage and token ids from a stream, read by read."""

    __slots__ = ("_cutter", "_dialect", "_ids", "_passthrough", "_unrequested_usage", "_usage")

    def __init__(self, injected: frozenset[Injection], dialect: DialectName) -> None:
        self._usage = "usage" in injected
        self._ids = "token-ids" in injected
        self._dialect = dialect
        self._cutter = EventSplitter()
        self._unrequested_usage = False
        """True: the engine sends usage in every event, so the final usage event is not due to injection."""
        self._passthrough = False

    def feed(self, data: bytes) -> bytes:
        """Return the filtered bytes for the client; an incomplete event waits for the next read."""
        if self._passthrough:
            return data
        out: list[bytes] = []
        for event in self._cutter.feed(data):
            self._filter_event(event, out)
        if self._cutter.buffered_bytes > MAX_EVENT_BYTES or BARE_CRS in data:
            self._passthrough = True
            out.append(self._cutter.flush())
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self) -> bytes:
        out: list[bytes] = []
        if flush := self._cutter.flush():
            self._filter_event(flush, out)
        return b"".join(out)

    def _filter_event(self, event: bytes, out: list[bytes]) -> None:
        with_ids = self._ids and b'token_ids"' in event
        with_usage = self._usage and b'"usage"' in event
        span = data_span(event) if with_ids or with_usage else None
        if span is None or not fits_in_memory(event):
            out.append(event)
            return
        data = event[span[0] : span[1]]
        try:
            filtered = self._filtered(data, with_ids=with_ids, with_usage=with_usage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            filtered = data
        if filtered is data:
            out.append(event)
        elif filtered is not None:
            out.append(event[: span[0]] + filtered + event[span[1] :])

    def _filtered(self, data: bytes, *, with_ids: bool, with_usage: bool) -> bytes | None:
        """Return an event's data without injected usage and token ids; None: drop the event."""
        event = _decode(data)
        if with_usage and (usage := bytes(event.usage)):
            if event.choices:
                data = self._without_null_usage(data, usage)
            elif event.choices is not None and usage != _NULL and not self._unrequested_usage:
                return None
        if not with_ids:
            return data
        if is_for_ids_alone(event):
            return None
        without, replaced = _IDS.subn(b'token_ids":null', data)
        return without if replaced == count_ids(event) else data  # token ids are also where vLLM does not put them

    def _without_null_usage(self, data: bytes, usage: bytes) -> bytes:
        """Return the data without ``null`` usage, which vLLM adds to each event of an injected stream."""
        if usage != _NULL:
            self._unrequested_usage = True
        elif self._dialect == "vllm":
            without, removed = _NULL_USAGE.subn(b"", data)
            return without if removed == 1 else data
        return data


def is_for_ids_alone(event: _Event) -> bool:
    """Return whether vLLM sends a chat event only for its token ids: its parsers hold the tokens' text back."""
    return bool(event.choices) and all(
        bytes(choice.delta) == b"{}"
        and bytes(choice.token_ids)[:1] == b"["
        and bytes(choice.finish_reason) in (b"", _NULL)
        and bytes(choice.logprobs) in (b"", _NULL)
        for choice in event.choices or ()
    )


def count_ids(event: _Event) -> int:
    """Return the number of members with token ids, where vLLM puts them."""
    members = [event.prompt_token_ids]
    for choice in event.choices or ():
        members += [choice.token_ids, choice.prompt_token_ids]
    return sum(bytes(member).startswith(b"[") for member in members)
