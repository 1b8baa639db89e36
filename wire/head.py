"""Heads of messages: a request's read strictly, a response's as nginx reads it, and their headers of one hop.

A request that two servers could read differently is refused. A response's oddities are mended on the way.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import Literal

import msgspec

Header = tuple[bytes, bytes]
Headers = Sequence[Header]
Framing = int | Literal["chunked"]
"""Bytes of a body, or ``chunked``."""
ENDLESS = 1 << 62
"""Bytes of a body that only the connection's end ends."""

MAX_LENGTH_DIGITS = 18
MAX_KNOWN_BYTES = 1024
SWITCHING_PROTOCOLS, OK = 101, 200
BODILESS = frozenset({204, 304})
REQUEST_LINE = re.compile(rb"([A-Z]+) ([\x21-\x7e\x80-\xff]+) HTTP/(1\.[01])\r\n")
STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
HEADER_LINE = re.compile(rb"^([!#$%&'*+\-.^_`|~0-9A-Za-z]++):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)\r?\n", re.MULTILINE)
SCHEMES = (b"http://", b"https://")
LENGTH, CODING = b"content-length", b"transfer-encoding"
FRAMING = (LENGTH, CODING)
# A gateway that turns headers into variables (CGI, WSGI) reads these as the framing headers that they look like.
FRAMING_LOOKALIKES = frozenset({b"content_length", b"transfer_encoding"})

# RFC 9110, section 7.6.1: these, and whatever Connection names, concern one connection only. Transfer-Encoding is kept:
# bodies pass with their chunk framing unchanged, so the word that describes it passes too.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})
KEPT_ALWAYS = frozenset({CODING, LENGTH, b"host"})


class FramingError(Exception):
    """A message that is none, or whose end cannot be told for sure; ``status`` is how to refuse a request."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class RequestHead(msgspec.Struct, frozen=True):
    """Request line and headers as they came: order, case and duplicates kept."""

    at_ns: int
    """When the head was complete (``perf_counter_ns``)."""
    method: bytes
    target: bytes
    """Path and query, byte for byte."""
    version: str
    headers: list[Header]
    names: list[bytes]
    """The headers' names in lower case, parallel to them."""
    framing: Framing

    @property
    def keep_alive(self) -> bool:
        return keeps_alive(self.version, self.headers, self.names)

    def values(self, name: bytes) -> list[bytes]:
        return header_values(self.headers, name)


class ResponseHead(msgspec.Struct, frozen=True):
    """Status line and headers as they came: order, case and duplicates kept."""

    version: str
    status: int
    reason: bytes
    headers: list[Header]
    names: list[bytes]
    """The headers' names in lower case, parallel to them."""
    raw: bytes
    """All of it, up to and with its empty line."""
    odd: bool
    """It was not written as it should be, and mended."""
    framing: Framing
    keep_alive: bool
    """The server keeps the connection, for all that the head says and that is known of the server."""

    @property
    def passes(self) -> bool:
        """Return whether it means for the next hop what it means for this one, byte for byte."""
        return self.version == "1.1" and HOP_BY_HOP.isdisjoint(self.names) and not self.until_close

    @property
    def informational(self) -> bool:
        """A 1xx response: another head follows."""
        return self.status < OK

    @property
    def until_close(self) -> bool:
        return self.framing == ENDLESS


def parse_request_head(data: bytes) -> RequestHead:
    """Read a complete head. Raises FramingError for one of which the next server could make another message."""
    at_ns = perf_counter_ns()
    start = REQUEST_LINE.match(data)
    if start is None:
        raise FramingError("a request line that is not of HTTP/1.1")
    method, target, version = start.groups()
    known = target.startswith(b"/") or target[:8].lower().startswith(SCHEMES) or method == b"CONNECT"
    if not known and (method, target) != (b"OPTIONS", b"*"):
        raise FramingError("a target that is neither a path nor an http URL")
    headers, names, odd = _header_lines(data, start.end())
    if odd:
        raise FramingError("a line that does not end in CRLF")
    hosts = names.count(b"host")
    if hosts > 1 or (version == b"1.1" and hosts == 0):
        raise FramingError("not exactly one Host header")
    if version == b"1.0" and CODING in names:
        raise FramingError("a Transfer-Encoding in HTTP/1.0, which has none")
    if not FRAMING_LOOKALIKES.isdisjoint(names):
        raise FramingError("a header that only looks like Content-Length or Transfer-Encoding")
    return RequestHead(at_ns, method, target, version.decode(), headers, names, _request_framing(headers, names))


def _request_framing(headers: Headers, names: Sequence[bytes]) -> Framing:
    if CODING not in names:
        lengths = names.count(LENGTH)
        if lengths > 1:
            raise FramingError("more than one Content-Length")
        return _length(headers[names.index(LENGTH)][1]) if lengths else 0
    if LENGTH in names:
        raise FramingError("both Content-Length and Transfer-Encoding")
    if [value.rstrip(b" ").lower() for value in header_values(headers, CODING)] != [b"chunked"]:
        raise FramingError("a Transfer-Encoding other than chunked", 501)
    return "chunked"


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise FramingError("a Content-Length that is not one number")
    return int(value)


def _header_lines(data: bytes, at: int) -> tuple[list[Header], list[bytes], bool]:
    """Return headers and their lower-case names of a complete head, and whether a line of it ends in LF alone."""
    headers: list[Header] = HEADER_LINE.findall(data, at)
    lines = data.count(b"\n")
    if len(headers) + 2 != lines:
        raise FramingError("a header line that is none")
    return headers, [name.lower() for name, _ in headers], data.count(b"\r\n") != lines


def parse_response_head(data: bytes) -> ResponseHead:
    """Read a complete head. Raises FramingError for one that no client could be sure of."""
    return (_known if len(data) <= MAX_KNOWN_BYTES else _parse)(data)


def _parse(data: bytes) -> ResponseHead:
    start = STATUS_LINE.match(data)
    if start is None:
        raise FramingError("not the head of an HTTP/1 response")
    version, status, reason = start.groups(b"")
    headers, names, odd = _header_lines(data, start.end())
    if b" \r" in data or b"\t\r" in data or b" \n" in data or b"\t\n" in data:
        headers = [(name, value.rstrip(b" \t")) for name, value in headers]
    framing: Framing = ENDLESS
    if CODING in names or LENGTH in names:
        mended, framing = _one_framing(headers, names)
        if mended is not headers:
            headers, odd = mended, True
            names = [name.lower() for name, _ in headers]
    if odd:
        data = serialise_head(b"HTTP/%b %b %b" % (version, status, reason), headers)
    return ResponseHead(
        version=version.decode(),
        status=int(status),
        reason=reason,
        headers=headers,
        names=names,
        raw=data,
        odd=odd,
        framing=0 if int(status) in BODILESS else framing,
        keep_alive=keeps_alive(version.decode(), headers, names) and not _closes_unsaid(headers, names),
    )


_known = lru_cache(maxsize=128)(_parse)
"""An engine's heads are nearly all equal within a second."""


def _closes_unsaid(headers: Headers, names: Sequence[bytes]) -> bool:
    """Return whether the server is llama.cpp's, and streams: then it closes, though it announces Keep-Alive.

    A request that was written on such a connection within the 0.2 ms before its close would be lost.
    """
    return CODING in names and b"llama.cpp" in header_values(headers, b"server")


def _one_framing(headers: list[Header], names: Sequence[bytes]) -> tuple[list[Header], Framing]:
    """Return the body's framing, and the headers with one that tells it: of equal lengths one, none beside chunks."""
    framing: Framing = "chunked"
    if CODING in names:
        if {value.strip(b" \t").lower() for value in header_values(headers, CODING)} != {b"chunked"}:
            raise FramingError("a Transfer-Encoding other than chunked, which nobody asked for")
        header = (b"Transfer-Encoding", b"chunked")
    else:
        lengths = b",".join(header_values(headers, LENGTH)).split(b",")
        length = b",".join({length.strip(b" \t") for length in lengths})
        framing, header = _length(length), (b"Content-Length", length)
    first, *more = (at for at, name in enumerate(names) if name in FRAMING)
    if not more and headers[first][1].lower() == header[1]:
        return headers, framing
    kept = [header for header, name in zip(headers, names, strict=True) if name not in FRAMING]
    return [*kept[:first], header, *kept[first:]], framing


def header_values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of ``name`` (lower case), in order."""
    return [value for key, value in headers if key.lower() == name]


def connection_options(headers: Headers) -> frozenset[bytes]:
    """The lower-case words of every Connection header."""
    return _options(b",".join(header_values(headers, b"connection")))


def keeps_alive(version: str, headers: Headers, names: Sequence[bytes]) -> bool:
    """Return whether the sender of this head keeps the connection; ``names`` in lower case."""
    if b"connection" not in names:
        return version == "1.1"
    options = connection_options(headers)
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


@lru_cache(maxsize=64)
def _options(values: bytes) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for word in values.split(b",") if word.strip())


def end_to_end(headers: Headers, names: Sequence[bytes]) -> list[Header]:
    """Return the headers that pass a proxy, as they came; ``names``: their lower-case names, parallel to them."""
    if HOP_BY_HOP.isdisjoint(names):
        return list(headers)
    dropped = (HOP_BY_HOP | connection_options(headers)) - KEPT_ALWAYS
    return [header for header, name in zip(headers, names, strict=True) if name not in dropped]


def serialise_head(start_line: bytes, headers: Iterable[Header]) -> bytes:
    """A message's head, its empty line included."""
    return b"\r\n".join((start_line, *map(b": ".join, headers), b"\r\n"))
