"""HTTP heads: strict parser of requests, lenient parser of responses (as nginx), and hop-by-hop headers.

A request that two servers could parse differently is refused. Framing violations of a response are repaired.
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
"""Length of a body in bytes, or ``chunked``."""
ENDLESS = 1 << 62
"""Length of a body that ends with the connection."""

MAX_LENGTH_DIGITS = 18
MAX_CACHED_BYTES = 1024
SWITCHING_PROTOCOLS, OK = 101, 200
BODILESS = frozenset({204, 304})
REQUEST_LINE = re.compile(rb"([A-Z]+) ([\x21-\x7e\x80-\xff]+) HTTP/(1\.[01])\r\n")
STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
HEADER_LINE = re.compile(rb"^([!#$%&'*+\-.^_`|~0-9A-Za-z]++):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)\r?\n", re.MULTILINE)
SCHEMES = (b"http://", b"https://")
LENGTH, CODING = b"content-length", b"transfer-encoding"
FRAMING = (LENGTH, CODING)
# Gateways that convert headers to variables (CGI, WSGI) would read these as framing headers.
FRAMING_LOOKALIKES = frozenset({b"content_length", b"transfer_encoding"})

# RFC 9110, section 7.6.1: these, and the headers that Connection lists, are hop-by-hop. Transfer-Encoding is relayed,
# since bodies are relayed with their chunk framing.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})
END_TO_END = frozenset({CODING, LENGTH, b"host"})


class FramingError(Exception):
    """Invalid message, or a message without a certain end; ``status``: of the error response to a request."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class RequestHead(msgspec.Struct, frozen=True):
    """Request line and headers as received, with order, case and duplicates."""

    at_ns: int
    """Arrival time of the request: the head was complete (``perf_counter_ns``). TTFT starts here."""
    method: bytes
    target: bytes
    """Path and query, unchanged."""
    version: str
    headers: list[Header]
    names: list[bytes]
    """Lower-case header names, parallel to ``headers``."""
    framing: Framing

    @property
    def keep_alive(self) -> bool:
        return keeps_alive(self.version, self.headers, self.names)

    def values(self, name: bytes) -> list[bytes]:
        return header_values(self.headers, name)


class ResponseHead(msgspec.Struct, frozen=True):
    """Status line and headers as received, with order, case and duplicates."""

    version: str
    status: int
    reason: bytes
    headers: list[Header]
    names: list[bytes]
    """Lower-case header names, parallel to ``headers``."""
    raw: bytes
    """Bytes of the head, empty line included."""
    odd: bool
    """True: the head violated the framing rules and was repaired."""
    framing: Framing
    keep_alive: bool
    """True: the server keeps the connection open, by the head and known behaviour of the server."""

    @property
    def passes(self) -> bool:
        """True if the head can be relayed unchanged: no hop-by-hop headers."""
        return self.version == "1.1" and HOP_BY_HOP.isdisjoint(self.names) and not self.until_close

    @property
    def informational(self) -> bool:
        """True for a 1xx response, which another head follows."""
        return self.status < OK

    @property
    def until_close(self) -> bool:
        return self.framing == ENDLESS


def parse_request_head(data: bytes) -> RequestHead:
    """Parse a complete head. Raises FramingError for a head that another server could parse differently."""
    at_ns = perf_counter_ns()
    start = REQUEST_LINE.match(data)
    if start is None:
        raise FramingError("a request line that is not of HTTP/1.1")
    method, target, version = start.groups()
    valid = target.startswith(b"/") or target[:8].lower().startswith(SCHEMES) or method == b"CONNECT"
    if not valid and (method, target) != (b"OPTIONS", b"*"):
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
    """Return headers, their lower-case names, and whether a line of the head ends in LF alone."""
    headers: list[Header] = HEADER_LINE.findall(data, at)
    lines = data.count(b"\n")
    if len(headers) + 2 != lines:
        raise FramingError("a header line that is none")
    return headers, [name.lower() for name, _ in headers], data.count(b"\r\n") != lines


def parse_response_head(data: bytes) -> ResponseHead:
    """Parse a complete head. Raises FramingError for an ambiguous head."""
    return (_parse_cached if len(data) <= MAX_CACHED_BYTES else _parse)(data)


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
        unified, framing = _unified_framing(headers, names)
        if unified is not headers:
            headers, odd = unified, True
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
        keep_alive=keeps_alive(version.decode(), headers, names) and not _closes_unannounced(headers, names),
    )


_parse_cached = lru_cache(maxsize=128)(_parse)
"""Cached: an engine's response heads are nearly all equal within a second."""


def _closes_unannounced(headers: Headers, names: Sequence[bytes]) -> bool:
    """Return whether the response is a stream of llama.cpp, which closes although it announces Keep-Alive.

    A request written on such a connection within the 0.2 ms before its close would be lost.
    """
    return CODING in names and b"llama.cpp" in header_values(headers, b"server")


def _unified_framing(headers: list[Header], names: Sequence[bytes]) -> tuple[list[Header], Framing]:
    """Return the framing, and the headers with a single framing header, without duplicates."""
    framing: Framing = "chunked"
    if CODING in names:
        if {value.strip(b" \t").lower() for value in header_values(headers, CODING)} != {b"chunked"}:
            raise FramingError("a Transfer-Encoding other than chunked, not requested")
        header = (b"Transfer-Encoding", b"chunked")
    else:
        lengths = b",".join(header_values(headers, LENGTH)).split(b",")
        length = b",".join({length.strip(b" \t") for length in lengths})
        framing, header = _length(length), (b"Content-Length", length)
    first, *more = (at for at, name in enumerate(names) if name in FRAMING)
    if not more and headers[first][1].lower() == header[1]:
        return headers, framing
    unframed = [header for header, name in zip(headers, names, strict=True) if name not in FRAMING]
    return [*unframed[:first], header, *unframed[first:]], framing


def header_values(headers: Headers, name: bytes) -> list[bytes]:
    """Return all values of ``name`` (lower case), in order."""
    return [value for key, value in headers if key.lower() == name]


def connection_options(headers: Headers) -> frozenset[bytes]:
    """Return the lower-case options of all Connection headers."""
    return _options(b",".join(header_values(headers, b"connection")))


def keeps_alive(version: str, headers: Headers, names: Sequence[bytes]) -> bool:
    """Return whether the sender keeps the connection open; ``names`` in lower case."""
    if b"connection" not in names:
        return version == "1.1"
    options = connection_options(headers)
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


@lru_cache(maxsize=64)
def _options(values: bytes) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for word in values.split(b",") if word.strip())


def end_to_end(headers: Headers, names: Sequence[bytes]) -> list[Header]:
    """Return the end-to-end headers, unchanged; ``names``: lower-case names, parallel to ``headers``."""
    if HOP_BY_HOP.isdisjoint(names):
        return list(headers)
    dropped = (HOP_BY_HOP | connection_options(headers)) - END_TO_END
    return [header for header, name in zip(headers, names, strict=True) if name not in dropped]


def serialise_head(start_line: bytes, headers: Iterable[Header]) -> bytes:
    """Return the bytes of a head, empty line included."""
    return b"\r\n".join((start_line, *map(b": ".join, headers), b"\r\n"))
