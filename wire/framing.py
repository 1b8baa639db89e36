"""Body framing: strict parser of request bodies, lenient parser of response bodies (as nginx), with repair.

A request body that the next server parses differently enables request smuggling. A response is complete if its end is
certain; framing violations are repaired while tokens are relayed, and reported by ``odd``.
"""

import re
from typing import Literal

from wire.head import FramingError

MAX_CHUNK_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 16 * 1024
MAX_CHUNKS_A_TURN = 512
"""Limit of chunks per turn, less than 1 ms: other connections' tokens wait no longer."""
DENSE_CHUNKS = 64
"""Chunks in a read after which the connection yields its turn: a turn may have dozens of reads of one socket."""
# No white space around the size, although old servers padded it: parsers differ on white space before an extension.
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
ODD_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
TRAILER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*")
# Some servers merge trailers into the headers; a trailer must not set another length or host.
NO_TRAILERS = frozenset({b"content-length", b"transfer-encoding", b"host", b"connection"})
USUAL_END = b"0\r\n\r\n"
USUAL_SIZES = {b"%x" % size: size for size in range(1, 4096)}
"""Size lines in the usual form."""
MAX_USUAL_LINE = 5
"""Longest usual size line, CRLF included."""
USUAL_BEGINNINGS = {len(line) + size + 4: line + b"\r\n" for line, size in USUAL_SIZES.items()}
"""Size line of a usual chunk, by the length of the complete chunk."""


class FixedBody:
    """Body of a known length."""

    odd = dense = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0

    def single_chunk(self, data: bytes) -> bytes | None:
        """Return None: the body is not chunked."""
        return None

    def feed(self, data: bytes) -> tuple[bytes, bytes, int]:
        """Return the bytes to relay, the body data among them, and the number of consumed bytes of ``data``."""
        size = len(data)
        if size > self._left:
            data, size = data[: self._left], self._left
        self._left -= size
        self.complete = self._left == 0
        return data, data, size


class ChunkedBody:
    """Incremental parser of a chunked body: size line, data, CRLF, …, last chunk, trailers (RFC 9112, 7.1).

    ``lenient``: for responses, as nginx. Lines may end in LF, sizes may be padded, invalid trailers are dropped.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self._lenient = lenient
        self._state: Literal["size", "data", "data_end", "trailer", "done"] = "size"
        self._left = 0
        self._line = b""
        """Incomplete line."""
        self._between = True
        """True: the next byte starts a chunk."""
        self._trailer_bytes = 0
        self._error: FramingError | None = None
        """Error behind valid bytes of the same read: raised by the next ``feed``."""
        self.complete = False
        """True: the body has ended."""
        self.dense = False
        """True: the last read had so many chunks that the connection should yield. Reset by the reader."""
        self.odd = False
        """True: the framing violated the rules."""

    def single_chunk(self, data: bytes) -> bytes | None:
        """Return the data of a read that is one usual chunk, as for most tokens; None: use ``feed``."""
        beginning = USUAL_BEGINNINGS.get(len(data)) if self._between else None
        if beginning is not None and data.startswith(beginning) and data.endswith(b"\r\n"):
            return data[len(beginning) : -2]
        return None

    def feed(self, data: bytes) -> tuple[bytes, bytes, int]:
        """Return the bytes to relay, the body data among them, and the number of consumed bytes of ``data``.

        ``feed`` stops at the body's end, and after ``MAX_CHUNKS_A_TURN`` chunks. Lines are returned once complete.
        Raises FramingError at the first invalid byte.
        """
        if self._error is not None:
            raise self._error
        pieces: list[bytes] = []
        repaired: list[bytes] = []
        at = copied = work = 0
        try:
            while at < len(data) and not self.complete and work < MAX_CHUNKS_A_TURN:
                before, work = at, work + 1
                if self._state == "data":
                    at = self._consume_data(data, at, pieces)
                    continue
                if self._state == "size" and not self._line:
                    number = len(pieces)
                    at = consume_usual_chunks(data, at, pieces, number + MAX_CHUNKS_A_TURN - work + 1)
                    if data[at : at + len(USUAL_END)] == USUAL_END:
                        self._state, self.complete, at = "done", True, at + len(USUAL_END)
                    if at > before:
                        work += len(pieces) - number - 1
                        continue
                line, at = self._consume_line(data, at)
                if line is not None:
                    repaired += (data[copied:before], line)
                    copied = at
        except FramingError as error:
            if at == 0:
                raise
            self._error, self.dense = error, True
        self.dense = self.dense or work > DENSE_CHUNKS
        self._between = self._state == "size" and not self._line and self._error is None
        raw = data[copied:at]
        if repaired:
            raw = b"".join((*repaired, raw))
        return raw, pieces[0] if len(pieces) == 1 else b"".join(pieces), at

    def _consume_data(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        piece = data[at : at + self._left]
        pieces.append(piece)
        self._left -= len(piece)
        if self._left == 0:
            self._state = "data_end"
        return at + len(piece)

    def _consume_line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """Consume (part of) a line at ``at``; return its bytes to relay, None: unchanged, and the offset behind it."""
        end = data.find(b"\n", at, at + MAX_CHUNK_LINE_BYTES + 1) + 1
        piece = data[at : end or None]
        line = self._line + piece
        if self._state == "data_end" and not b"\r\n".startswith(line) and not (self._lenient and line == b"\n"):
            raise FramingError("a chunk longer than its size")
        if len(line) > MAX_CHUNK_LINE_BYTES:
            raise FramingError("a chunk whose framing is too long, or wrong")
        if not end:
            self._line = line
            return b"", len(data)
        passed = self._act(line)
        is_single_read, self._line = not self._line, b""
        return (None if is_single_read and passed == line else passed), end

    def _act(self, line: bytes) -> bytes:
        """Process a complete line; return the line with repaired framing."""
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
            return self._consume_trailer(text, line)
        return line

    def _begin_chunk(self, text: bytes, line: bytes) -> bytes:
        match = SIZE_LINE.fullmatch(text)
        if match is None and self._lenient and (match := ODD_SIZE_LINE.fullmatch(text)) is not None:
            self.odd = True
            line = match[1] + b"\r\n"
        if match is None:
            raise FramingError("a chunk size that is not a number")
        self._left = int(match[1], 16)
        self._state = "data" if self._left else "trailer"
        return line

    def _consume_trailer(self, text: bytes, line: bytes) -> bytes:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            raise FramingError("trailers too large", 431)
        match = TRAILER_LINE.fullmatch(text)
        if match is not None and match[1].lower() not in NO_TRAILERS:
            return line
        if not self._lenient:
            raise FramingError("a trailer that is none, or that belongs into the head")
        self.odd = True
        return b""


def consume_usual_chunks(data: bytes, at: int, pieces: list[bytes], max_pieces: int) -> int:
    """Append complete chunks in the usual form, up to ``max_pieces`` pieces; return the offset behind them."""
    find, size_of = data.find, USUAL_SIZES.get
    while len(pieces) < max_pieces:
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
