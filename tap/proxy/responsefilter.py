"""Removal of injected usage and token ids from a stream: bytes are cut, and none are written anew.

It passes event by event. Without the injection vLLM writes ``null`` for ids, so the filter leaves ``null``. Anything
that is not JSON of the expected form passes unchanged.
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
"""End of an event that HTML's rules allow and no engine writes: a stream with it passes unfiltered."""


class EventCutter:
    """Splits a stream, read by read, into the bytes of complete events."""

    __slots__ = ("_held", "_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that end within ``data``, each with its empty line; with the rest they are the stream."""
        if not self._held and is_one_event(data):
            return [data]
        events, held, begin = [], self._held, 0
        held += data
        while (end := _EVENT_END.search(held, max(begin, self._searched))) is not None:
            events.append(bytes(held[begin : end.end()]))
            begin = end.end()
        del held[:begin]
        self._searched = max(0, len(held) - 3)
        return events

    def rest(self) -> bytes:
        held, self._held, self._searched = bytes(self._held), bytearray(), 0
        return held


def is_one_event(data: bytes) -> bool:
    """Return whether ``data`` is exactly one event of one line, as nearly all reads of a stream are."""
    return data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2 and b"\r" not in data


def data_span(event: bytes) -> tuple[int, int] | None:
    """Return the span of an event's data if it is one line, as engines write it; null: no or several lines."""
    if event.startswith(b"data: ") and is_one_event(event):
        return 6, len(event) - 2
    lines = list(islice(_DATA_LINE.finditer(event), 2))
    return lines[0].span(1) if len(lines) == 1 else None


MAX_EVENT_BYTES = 32 << 20
"""After a longer event the stream passes unfiltered."""

_ABSENT = msgspec.Raw()
_NULL = b"null"


class _Choice(msgspec.Struct):
    """Members of a choice that decide about an event, as they are written."""

    delta: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    finish_reason: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


class _Event(msgspec.Struct):
    """Members that decide about an event."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Event).decode

# A quote inside a JSON string has a backslash before it, so these find members of such names only, at whatever depth.
_IDS = re.compile(rb'token_ids"\s*:\s*\[[\d,\s]*\]')
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')


class ResponseFilter:
    """Filter of a stream, read by read."""

    __slots__ = ("_cutter", "_dialect", "_ids", "_passing", "_unasked_usage", "_usage")

    def __init__(self, injected: frozenset[Injection], dialect: DialectName) -> None:
        self._usage = "usage" in injected
        self._ids = "token-ids" in injected
        self._dialect = dialect
        self._cutter = EventCutter()
        self._unasked_usage = False
        """The engine sends usage in all events: it would have sent the last one without injection."""
        self._passing = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes for the client; an incomplete event waits for the next read."""
        if self._passing:
            return data
        out: list[bytes] = []
        for event in self._cutter.feed(data):
            self._take(event, out)
        if self._cutter.held_bytes > MAX_EVENT_BYTES or BARE_CRS in data:
            self._passing = True
            out.append(self._cutter.rest())
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self) -> bytes:
        out: list[bytes] = []
        if rest := self._cutter.rest():
            self._take(rest, out)
        return b"".join(out)

    def _take(self, event: bytes, out: list[bytes]) -> None:
        """Add the filtered event to ``out``, unless it is dropped."""
        with_ids = self._ids and b'token_ids"' in event
        with_usage = self._usage and b'"usage"' in event
        span = data_span(event) if with_ids or with_usage else None
        if span is None or not fits_in_memory(event):
            out.append(event)
            return
        data = event[span[0] : span[1]]
        try:
            kept = self._filtered(data, with_ids=with_ids, with_usage=with_usage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            kept = data
        if kept is data:
            out.append(event)
        elif kept is not None:
            out.append(event[: span[0]] + kept + event[span[1] :])

    def _filtered(self, data: bytes, *, with_ids: bool, with_usage: bool) -> bytes | None:
        """Return an event's data without the additions; null: drop the event."""
        found = _decode(data)
        if with_usage and (usage := bytes(found.usage)):
            if found.choices:
                data = self._without_null_usage(data, usage)
            elif found.choices is not None and usage != _NULL and not self._unasked_usage:
                return None
        if not with_ids:
            return data
        if is_for_ids_alone(found):
            return None
        without, replaced = _IDS.subn(b'token_ids":null', data)
        return without if replaced == count_ids(found) else data  # there are others than where vLLM puts them

    def _without_null_usage(self, data: bytes, usage: bytes) -> bytes:
        """Return the data of an event with usage and choices: the engine sends usage unasked, or null at first."""
        if usage != _NULL:
            self._unasked_usage = True
        elif self._dialect == "vllm":
            without, removed = _NULL_USAGE.subn(b"", data)
            return without if removed == 1 else data
        return data


def is_for_ids_alone(event: _Event) -> bool:
    """Return whether vLLM sends a chat event only for its ids: its parsers have not yet made text of the tokens."""
    return bool(event.choices) and all(
        bytes(choice.delta) == b"{}"
        and bytes(choice.token_ids)[:1] == b"["
        and bytes(choice.finish_reason) in (b"", _NULL)
        and bytes(choice.logprobs) in (b"", _NULL)
        for choice in event.choices or ()
    )


def count_ids(event: _Event) -> int:
    """Return the number of members with token ids in the places where vLLM puts them."""
    members = [event.prompt_token_ids]
    for choice in event.choices or ():
        members += [choice.token_ids, choice.prompt_token_ids]
    return sum(bytes(member).startswith(b"[") for member in members)
