"""The end of a request's body, read strictly: a body that the next server reads differently is a smuggled request."""

import re
from collections.abc import Sequence
from typing import Literal

from wire.head import Headers, header_values

MAX_LENGTH_DIGITS = 18
MAX_CHUNK_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 16 * 1024
# No white space around the size, although old servers padded it: parsers differ on what it means before an extension.
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
TRAILER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*")
# A server that merges trailers into the headers, as some do, must not find another length or host there.
NO_TRAILERS = frozenset({b"content-length", b"transfer-encoding", b"host", b"connection"})


class FramingError(Exception):
    """A request whose end cannot be told for sure; ``status`` is how to refuse it."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def body_framing(headers: Headers, names: Sequence[bytes]) -> int | Literal["chunked"]:
    """Return the body's bytes, or ``chunked``; ``names`` in lower case. Raises FramingError if headers differ."""
    lengths = names.count(b"content-length")
    if b"transfer-encoding" in names:
        if lengths:
            raise FramingError("both Content-Length and Transfer-Encoding")
        codings = header_values(headers, b"transfer-encoding")
        if len(codings) > 1 or codings[0].strip(b" \t").lower() != b"chunked":
            raise FramingError("a Transfer-Encoding other than chunked", 501)
        return "chunked"
    if lengths == 0:
        return 0
    length = headers[names.index(b"content-length")][1]
    if lengths > 1 or not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
        raise FramingError("a Content-Length that is not one number")
    return int(length)


class FixedBody:
    """A body of a known number of bytes."""

    __slots__ = ("_left", "complete")

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = length == 0
        """Whether the body has ended."""

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """The body's bytes in ``data`` and how many bytes of ``data`` belong to it."""
        size = len(data)
        if size > self._left:
            data, size = data[: self._left], self._left
        self._left -= size
        self.complete = self._left == 0
        return data, size


class ChunkedBody:
    """A chunked body, cut anywhere: size line, data, CRLF, …, last chunk, trailers, empty line (RFC 9112, 7.1)."""

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes")

    def __init__(self) -> None:
        self._state: Literal["size", "data", "data_end", "trailer", "done"] = "size"
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0

    @property
    def complete(self) -> bool:
        return self._state == "done"

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the body's bytes in ``data`` and the number read; raises FramingError at the first wrong byte."""
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and self._state != "done":
            if self._state == "data":
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = "data_end"
            else:
                at = self._take_line(data, at)
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), at

    def _take_line(self, data: bytes, at: int) -> int:
        """Consume a line that begins or goes on at ``at``; acts on it once its CRLF is there."""
        end = data.find(b"\n", at)
        if end < 0:
            self._line += data[at:]
            self._check_line()
            return len(data)
        line = self._line + data[at : end + 1]
        self._line = line
        self._check_line()
        self._line = b""
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise FramingError("a line of a chunked body that does not end in CRLF")
        self._act(line[:-2])
        return end + 1

    def _check_line(self) -> None:
        if self._state == "data_end" and not b"\r\n".startswith(self._line):
            raise FramingError("a chunk longer than its size")
        if len(self._line) > MAX_CHUNK_LINE_BYTES:
            raise FramingError("a chunk whose framing is too long, or wrong")

    def _act(self, line: bytes) -> None:
        if self._state == "size":
            found = SIZE_LINE.fullmatch(line)
            if found is None:
                raise FramingError("a chunk size that is not a number")
            self._left = int(found[1], 16)
            self._state = "data" if self._left else "trailer"
        elif self._state == "data_end":
            self._state = "size"
        elif not line:
            self._state = "done"
        else:
            found = TRAILER_LINE.fullmatch(line)
            if found is None or found[1].lower() in NO_TRAILERS:
                raise FramingError("a trailer that is none, or that belongs into the head")
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise FramingError("trailers too large", 431)
