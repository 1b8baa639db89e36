"""Server-sent events out of a byte stream that may be cut anywhere.

Lines end in LF, CRLF or CR, an event in an empty line; its data is its ``data:`` lines joined by LF. Comments and other
fields are skipped, and an event without data is none (WHATWG HTML, section 9.2.6).
"""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStream:
    """Takes a stream read by read and gives the data of each event that a read completed."""

    __slots__ = ("_rest", "_started", "_swallow_lf")

    def __init__(self) -> None:
        self._rest = b""
        self._started = False
        # A CR ends a line at once, so that no event waits for the next read; an LF that follows it belongs to it.
        self._swallow_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that end within ``data``, in order; what is left waits for the next read."""
        if self._swallow_lf or data.find(b"\r") >= 0:
            data = self._with_lf(data)
        elif self._started and not self._rest and is_one_line(data):
            return [data[6:-2]]
        buffered = self._rest + data if self._rest else data
        if not self._started:
            if len(buffered) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(buffered):
                self._rest = buffered
                return []
            self._started = True
            buffered = buffered.removeprefix(BYTE_ORDER_MARK)
        *blocks, self._rest = buffered.split(b"\n\n")
        events = [block[6:] if block[:6] == b"data: " and b"\n" not in block else event_data(block) for block in blocks]
        return [event for event in events if event is not None]

    def _with_lf(self, data: bytes) -> bytes:
        if self._swallow_lf and data.startswith(b"\n"):
            data = data[1:]
            self._swallow_lf = False
        if data:
            self._swallow_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def is_one_line(data: bytes) -> bool:
    """Return whether ``data``, without CR, is exactly one event of one data line, as most reads of a stream are."""
    return data[:6] == b"data: " and data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2


def event_data(block: bytes) -> bytes | None:
    """The data of one event's lines; None for a comment, a keep-alive, or any event without data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [
        line[5:].removeprefix(b" ") if line != b"data" else b""
        for line in block.split(b"\n")
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(values) if values else None
