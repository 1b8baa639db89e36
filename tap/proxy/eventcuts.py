"""A stream of server-sent events cut into events, every byte kept: what is not changed passes as it came."""

import re

LATE_LF = b"\n"
"""What is given for an LF that came a read later than its CR, which had ended an event: no event is that short."""

# A line ends in CRLF, LF or CR, an event in an empty line (WHATWG HTML, section 9.2.6). The groups are atomic: a CRLF
# is one line's end, never a CR's and an LF's.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_DATA_LINE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])data:(?: ?)([^\r\n]*)")


class EventCutter:
    """Takes a stream read by read and gives the bytes of each event that a read completed."""

    __slots__ = ("_after_cr", "_held", "_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0
        self._after_cr = False
        """The last event ended in a CR at the very end of a read: an LF that comes first now belongs to it."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the event that has begun and not ended."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end within ``data``, each with its empty line; together with the rest they are the stream."""
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
        """What was held of an event that never ended; nothing is held any more."""
        held, self._held, self._searched = bytes(self._held), bytearray(), 0
        return held


def is_one_event(data: bytes) -> bool:
    """Whether ``data`` is exactly one event of one line, as nearly every read of a stream is."""
    return data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2 and b"\r" not in data


def data_span(event: bytes) -> tuple[int, int] | None:
    """Where an event's data stands, if it is one line, as all engines write it; null: there is none, or several."""
    if event.startswith(b"data: ") and is_one_event(event):
        return 6, len(event) - 2
    lines = list(_DATA_LINE.finditer(event))
    return lines[0].span(1) if len(lines) == 1 else None
