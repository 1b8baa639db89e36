"""Removal of injected usage and token ids from a response: bytes are cut, and none are written anew.

A stream passes event by event. Without the injection vLLM writes ``null`` for ids, so the filter leaves ``null``;
SGLang omits the members. Anything that is not JSON of the expected form passes unchanged.
"""

import re
from itertools import islice

import msgspec

from engines.dialect import DialectName
from tap.ipc.settings import Injection
from tap.proxy.jsonspans import (
    Edit,
    Member,
    Span,
    UnlocatableError,
    apply_edits,
    array_items,
    object_members,
    without_members,
)
from wire.jsonsize import fits_in_memory

LATE_LF = b"\n"
"""Piece for an LF that comes a read later than its CR, which had ended an event; no event is that short."""

# A line ends in CRLF, LF or CR, an event in an empty line (WHATWG HTML, section 9.2.6). The groups are atomic: a CRLF
# is one line's end, never a CR's and an LF's.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_DATA_LINE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])data:(?: ?)([^\r\n]*)")


class EventCutter:
    """Splits a stream, read by read, into the bytes of complete events."""

    __slots__ = ("_after_cr", "_held", "_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0
        self._after_cr = False
        """The last event ended in a CR at the end of a read: an LF at the start of the next belongs to it."""

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that end within ``data``, each with its empty line; with the rest they are the stream."""
        if not self._held and not self._after_cr and is_one_event(data):
            return [data]
        events = []
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                events.append(LATE_LF)
                data = data[1:]
        held = self._held
        held += data
        begin = 0
        while (end := _EVENT_END.search(held, max(begin, self._searched))) is not None:
            events.append(bytes(held[begin : end.end()]))
            begin = self._searched = end.end()
        self._after_cr = bool(begin) and begin == len(held) and held.endswith(b"\r")
        del held[:begin]
        self._searched = max(0, len(held) - 1 if not held.endswith(b"\r\n") else len(held) - 2)
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

MAX_CHOICES = 1000
"""Choices of an event or body from which ids are removed; each may cost 10 µs of the event loop."""

ID_MEMBERS = frozenset({"prompt_token_ids", "token_ids", "response_token_ids"})
_ABSENT = msgspec.Raw()
_NULL = b"null"


class _Choice(msgspec.Struct):
    """Members of a choice that decide about an event, as they are written."""

    delta: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    finish_reason: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    response_token_ids: msgspec.Raw = _ABSENT
    """SGLang's name in whole chats."""


class _Event(msgspec.Struct):
    """Members that decide about an event or a whole body."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Event).decode

# A quote inside a JSON string has a backslash before it, so these find members of such names only, at whatever depth.
_VLLM_IDS = re.compile(rb'token_ids":\[[\d,]*\]')
_SGLANG_IDS = re.compile(rb',"(?:prompt_|response_)?token_ids":(?:\[[\d,]*\]|null)')


class ResponseFilter:
    """Filter of a response: a stream read by read, or one JSON text."""

    __slots__ = ("_cutter", "_dialect", "_dropped", "_ids", "_passing", "_unasked_usage", "_usage")

    def __init__(self, injected: frozenset[Injection], dialect: DialectName) -> None:
        self._usage = "usage" in injected
        self._ids = "token-ids" in injected
        self._dialect = dialect
        self._cutter = EventCutter()
        self._dropped = False
        self._unasked_usage = False
        """The engine sends usage in all events: it would have sent the last one without injection."""
        self._passing = False

    @property
    def filters_whole(self) -> bool:
        """True if a response that is one JSON text holds an addition; its usage is there without injection."""
        return self._ids

    def let_pass(self) -> None:
        self._passing = True

    def feed(self, data: bytes) -> bytes:
        """Return the bytes for the client; an incomplete event waits for the next read."""
        if self._passing:
            return data
        out: list[bytes] = []
        for event in self._cutter.feed(data):
            if event != LATE_LF:
                self._dropped = not self._take(event, out)
            elif not self._dropped:
                out.append(event)
        if self._cutter.held_bytes > MAX_EVENT_BYTES:
            self._passing = True
            out.append(self._cutter.rest())
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self) -> bytes:
        out: list[bytes] = []
        if rest := self._cutter.rest():
            self._take(rest, out)
        return b"".join(out)

    def whole(self, body: bytes) -> bytes:
        if not self._ids or not fits_in_memory(body):
            return body
        try:
            return self._without_ids(body, _decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnlocatableError):
            return body

    def _take(self, event: bytes, out: list[bytes]) -> bool:
        """Add the filtered event to ``out``; False if it is dropped."""
        with_ids = self._ids and b'token_ids"' in event
        with_usage = self._usage and b'"usage"' in event
        span = data_span(event) if with_ids or with_usage else None
        if span is None or not fits_in_memory(event):
            out.append(event)
            return True
        data = event[span[0] : span[1]]
        try:
            kept = self._filtered(data, with_ids=with_ids, with_usage=with_usage, out=out)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnlocatableError):
            kept = data
        if kept is data:
            out.append(event)
        elif kept is not None:
            out.append(event[: span[0]] + kept + event[span[1] :])
        return kept is not None

    def _filtered(self, data: bytes, *, with_ids: bool, with_usage: bool, out: list[bytes]) -> bytes | None:
        """Return an event's data without the additions; null: drop the event."""
        found = _decode(data)
        if with_usage and (usage := bytes(found.usage)):
            if found.choices:
                data = self._without_null_usage(data, usage)
            elif found.choices is not None and usage != _NULL and not self._unasked_usage:
                if self._dialect == "llamacpp":
                    move_timings(data, out)
                return None
        if not with_ids:
            return data
        if self._dialect == "vllm" and is_for_ids_alone(found):
            return None
        return self._without_ids(data, found)

    def _without_null_usage(self, data: bytes, usage: bytes) -> bytes:
        """Return the data of an event with usage and choices: the engine sends usage unasked, or null at first."""
        if usage != _NULL:
            self._unasked_usage = True
        elif self._dialect == "vllm":
            return apply_edits(data, without_members(object_members(data), frozenset({"usage"})))
        return data

    def _without_ids(self, data: bytes, found: _Event) -> bytes:
        if len(found.choices or ()) > MAX_CHOICES:
            raise UnlocatableError
        leave_null = self._dialect == "vllm"
        places = count_ids(found, nulls=not leave_null)
        if not places:
            return data
        without, replaced = _VLLM_IDS.subn(b'token_ids":null', data) if leave_null else _SGLANG_IDS.subn(b"", data)
        if replaced == places:  # as many as are where ids are expected: so it is these
            return without
        return apply_edits(data, id_edits(data, leave_null=leave_null))


def is_for_ids_alone(event: _Event) -> bool:
    """Return whether vLLM sends a chat event only for its ids: its parsers have not yet made text of the tokens."""
    return bool(event.choices) and all(
        bytes(choice.delta) == b"{}"
        and bytes(choice.token_ids)[:1] == b"["
        and bytes(choice.finish_reason) in (b"", _NULL)
        and bytes(choice.logprobs) in (b"", _NULL)
        for choice in event.choices or ()
    )


def count_ids(event: _Event, *, nulls: bool) -> int:
    """Return the number of members with token ids in the places where engines put them; ``nulls`` count too if set."""
    count = int(_holds_ids(event.prompt_token_ids, nulls=nulls))
    for choice in event.choices or ():
        members = (choice.token_ids, choice.prompt_token_ids, choice.response_token_ids)
        count += sum(_holds_ids(member, nulls=nulls) for member in members)
    return count


def _holds_ids(value: msgspec.Raw, *, nulls: bool) -> bool:
    return value is not _ABSENT and bytes(value).startswith((b"[", b"n") if nulls else b"[")


def id_edits(data: bytes, *, leave_null: bool) -> list[Edit]:
    members = object_members(data)
    edits = _id_edits_of(data, members, leave_null=leave_null)
    if "choices" in members:
        for choice in array_items(data, members["choices"].value):
            edits += _id_edits_of(data, object_members(data, choice), leave_null=leave_null)
    return edits


def _id_edits_of(data: bytes, members: dict[str, Member], *, leave_null: bool) -> list[Edit]:
    if not leave_null:
        return without_members(members, ID_MEMBERS)
    spans = [members[name].value for name in ID_MEMBERS if name in members]
    return [Edit(*span, _NULL) for span in spans if data.startswith(b"[", span.start)]


def move_timings(usage_event: bytes, out: list[bytes]) -> None:
    """Move llama.cpp's ``timings`` to the end of the event before, their place without a usage event.

    llama.cpp writes the two at once, so both come in one read; else the timings are lost.
    """
    members = object_members(usage_event)
    span = data_span(out[-1]) if out else None
    if "timings" not in members or span is None:
        return
    before = out[-1]
    end = before.rindex(b"}", *span)
    timings = Span(members["timings"].start, members["timings"].value.end).of(usage_event)
    out[-1] = before[:end] + b"," + timings + before[end:]
