"""The end of a body: a request's read strictly, a response's as nginx reads it, and passed on as it should have been.

A body that the next server reads differently is a smuggled request. A response is whole to its client wherever its end
is certain; an oddity of its framing is mended on the way, and told of by ``odd``.
"""

import re
from typing import Literal

from wire.head import FramingError

MAX_CHUNK_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 16 * 1024
MAX_CHUNKS_A_TURN = 512
"""Most chunks read before others have their turn: less than a millisecond."""
DENSE_CHUNKS = 64
"""A read of more chunks is the last of its turn: one turn may bring some dozens of reads from one socket."""
# No white space around the size, although old servers padded it: parsers differ on what it means before an extension.
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
ODD_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
TRAILER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*")
# A server that merges trailers into the headers, as some do, must not find another length or host there.
NO_TRAILERS = frozenset({b"content-length", b"transfer-encoding", b"host", b"connection"})
USUAL_END = b"0\r\n\r\n"
USUAL_SIZES = {b"%x" % size: size for size in range(1, 4096)}
"""Size lines as nearly all are written."""
MAX_USUAL_LINE = 5
"""The longest of them with its CRLF."""
USUAL_BEGINNINGS = {len(line) + size + 4: line + b"\r\n" for line, size in USUAL_SIZES.items()}
"""Size line of a usual chunk by the length of the whole."""


class FixedBody:
    """A body of a known number of bytes."""

    odd = dense = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0

    def one_chunk(self, data: bytes) -> bytes | None:
        """Return null: it has no chunks."""
        return None

    def feed(self, data: bytes) -> tuple[bytes, bytes, int]:
        """Return the bytes to pass on, the body's bytes among them, and the number of bytes of ``data`` read."""
        size = len(data)
        if size > self._left:
            data, size = data[: self._left], self._left
        self._left -= size
        self.complete = self._left == 0
        return data, data, size


class ChunkedBody:
    """A chunked body, cut anywhere: size line, data, CRLF, …, last chunk, trailers, empty line (RFC 9112, 7.1).

    ``lenient``: as nginx reads a response's. Lines may end in LF, sizes be padded; trailers that are none are left out.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self._lenient = lenient
        self._state: Literal["size", "data", "data_end", "trailer", "done"] = "size"
        self._left = 0
        self._line = b""
        """Beginning of a line whose end is not there yet."""
        self._between = True
        """Whether a chunk begins with the next byte."""
        self._trailer_bytes = 0
        self._error: FramingError | None = None
        """Found behind good bytes of the same read: raised once those have passed."""
        self.complete = False
        """Whether the body has ended."""
        self.dense = False
        """Whether the last read was so much work that others should have their turn. The reader takes it back."""
        self.odd = False
        """Whether the framing was not as it should be."""

    def one_chunk(self, data: bytes) -> bytes | None:
        """Return the body's bytes of a read that is one chunk, written as usual; null: it is for ``feed``."""
        beginning = USUAL_BEGINNINGS.get(len(data)) if self._between else None
        if beginning is not None and data.startswith(beginning) and data.endswith(b"\r\n"):
            return data[len(beginning) : -2]
        return None

    def feed(self, data: bytes) -> tuple[bytes, bytes, int]:
        """Return the bytes to pass on, the body's bytes among them, and the number of bytes of ``data`` read.

        Fewer are read than there are at the body's end, and before others have their turn. A line passes once it is
        whole. Raises FramingError at the first wrong byte.
        """
        if self._error is not None:
            raise self._error
        pieces: list[bytes] = []
        mended: list[bytes] = []
        at = kept = work = 0
        try:
            while at < len(data) and not self.complete and work < MAX_CHUNKS_A_TURN:
                before, work = at, work + 1
                if self._state == "data":
                    at = self._take_data(data, at, pieces)
                    continue
                if self._state == "size" and not self._line:
                    number = len(pieces)
                    at = take_whole_chunks(data, at, pieces, number + MAX_CHUNKS_A_TURN - work + 1)
                    if data[at : at + len(USUAL_END)] == USUAL_END:
                        self._state, self.complete, at = "done", True, at + len(USUAL_END)
                    if at > before:
                        work += len(pieces) - number - 1
                        continue
                line, at = self._take_line(data, at)
                if line is not None:
                    mended += (data[kept:before], line)
                    kept = at
        except FramingError as error:
            if at == 0:
                raise
            self._error, self.dense = error, True
        self.dense = self.dense or work > DENSE_CHUNKS
        self._between = self._state == "size" and not self._line and self._error is None
        raw = data[kept:at]
        if mended:
            raw = b"".join((*mended, raw))
        return raw, pieces[0] if len(pieces) == 1 else b"".join(pieces), at

    def _take_data(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        piece = data[at : at + self._left]
        pieces.append(piece)
        self._left -= len(piece)
        if self._left == 0:
            self._state = "data_end"
        return at + len(piece)

    def _take_line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """Consume a line that begins or goes on at ``at``; returns its bytes to pass on, null: as they are."""
        end = data.find(b"\n", at, at + MAX_CHUNK_LINE_BYTES + 1) + 1
        part = data[at : end or None]
        line = self._line + part
        if self._state == "data_end" and not b"\r\n".startswith(line) and not (self._lenient and line == b"\n"):
            raise FramingError("a chunk longer than its size")
        if len(line) > MAX_CHUNK_LINE_BYTES:
            raise FramingError("a chunk whose framing is too long, or wrong")
        if not end:
            self._line = line
            return b"", len(data)
        passed = self._act(line)
        whole, self._line = not self._line, b""
        return (None if whole and passed == line else passed), end

    def _act(self, line: bytes) -> bytes:
        """Act on a line; returns it as it should have been."""
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        if not line.endswith(b"\r\n") or b"\r" in text:
            if not self._lenient:
                raise FramingError("a line of a chunked body that does not end in CRLF")
            self.odd, line = True, text + b"\r\n"
        if self._state == "size":
            return self._begin_chunk(text, line)
        if self._state == "data_end":
            self._state = "size"
        elif not text:
            self._state, self.complete = "done", True
        else:
            return self._take_trailer(text, line)
        return line

    def _begin_chunk(self, text: bytes, line: bytes) -> bytes:
        found = SIZE_LINE.fullmatch(text)
        if found is None and self._lenient and (found := ODD_SIZE_LINE.fullmatch(text)) is not None:
            self.odd = True
            line = found[1] + b"\r\n"
        if found is None:
            raise FramingError("a chunk size that is not a number")
        self._left = int(found[1], 16)
        self._state = "data" if self._left else "trailer"
        return line

    def _take_trailer(self, text: bytes, line: bytes) -> bytes:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            raise FramingError("trailers too large", 431)
        found = TRAILER_LINE.fullmatch(text)
        if found is not None and found[1].lower() not in NO_TRAILERS:
            return line
        if not self._lenient:
            raise FramingError("a trailer that is none, or that belongs into the head")
        self.odd = True
        return b""


def take_whole_chunks(data: bytes, at: int, pieces: list[bytes], most: int) -> int:
    """Add chunks that are all there and written as usual, up to ``most`` pieces; returns the offset behind them."""
    find, size_of = data.find, USUAL_SIZES.get
    while len(pieces) < most:
        end = find(b"\r\n", at, at + MAX_USUAL_LINE)
        size = size_of(data[at:end]) if end > 0 else None
        if size is None:
            break
        stop = end + 2 + size
        if data[stop : stop + 2] != b"\r\n":
            break
        pieces.append(data[end + 2 : stop])
        at = stop + 2
    return at
