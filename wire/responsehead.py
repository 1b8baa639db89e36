"""A response's head: what it says, read as leniently as nginx does, and passed on as it should have been."""

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from wire.framing import MAX_LENGTH_DIGITS, ChunkedBody, FixedBody, OpenBody
from wire.head import HOP_BY_HOP, Header, header_values, keeps_alive, serialise_head

SWITCHING_PROTOCOLS, OK = 101, 200
BODILESS = frozenset({204, 304})
EMPTY_LINES = re.compile(rb"[\r\n]+")
HEAD_END = re.compile(rb"\n\r?\n")
STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
HEADER_LINE = re.compile(rb"^([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\r?\n", re.MULTILINE)
MAX_KNOWN_BYTES = 1024
FRAMING = (b"content-length", b"transfer-encoding")


class BadResponseError(Exception):
    """Bytes that are no response to what was asked; the connection cannot be trusted any further."""


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
    more: bool
    """Of a final head: the same read holds more of the response, or its end; the sink hears of it at once."""
    length: int | None
    """Bytes of its body. Null: it is chunked, or ends with the connection."""
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
        """Return whether nothing but the connection's end will tell where the body ends."""
        return not (self.status in BODILESS or b"content-length" in self.names or b"transfer-encoding" in self.names)

    def body(self, *, head_only: bool) -> FixedBody | ChunkedBody:
        """Return the reader of its body; ``head_only``: the request was a HEAD."""
        if self.length is not None or head_only:
            return FixedBody(0 if head_only else self.length or 0)
        return ChunkedBody(lenient=True) if b"transfer-encoding" in self.names else OpenBody()


def parse_response_head(data: bytes, *, more: bool) -> ResponseHead:
    """Read a complete head. Raises BadResponseError for one that no client could be sure of."""
    return (_known if len(data) <= MAX_KNOWN_BYTES else _parse)(data, more)


def _parse(data: bytes, more: bool) -> ResponseHead:
    start = STATUS_LINE.match(data)
    if start is None:
        raise BadResponseError("not the head of an HTTP/1 response")
    version, status, reason = start.groups(b"")
    headers: list[Header] = HEADER_LINE.findall(data, start.end())
    lines = data.count(b"\n")
    if len(headers) + 2 != lines:
        raise BadResponseError("a header line that is none")
    if b" \r" in data or b"\t\r" in data or b" \n" in data or b"\t\n" in data:
        headers = [(name, value.rstrip(b" \t")) for name, value in headers]
    names = [name.lower() for name, _ in headers]
    odd = data.count(b"\r\n") != lines
    if b"transfer-encoding" in names or b"content-length" in names:
        mended = with_one_framing(headers, names)
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
        more=more,
        length=_length(int(status), headers, names),
        keep_alive=keeps_alive(version.decode(), headers, names) and not closes_unsaid(headers, names),
    )


_known = lru_cache(maxsize=128)(_parse)
"""An engine's heads are nearly all equal within a second."""


def closes_unsaid(headers: list[Header], names: list[bytes]) -> bool:
    """Return whether the server is llama.cpp's, and streams: then it closes, though it announces Keep-Alive.

    A request that was written on such a connection within the 0.2 ms before its close would be lost.
    """
    return b"transfer-encoding" in names and b"llama.cpp" in header_values(headers, b"server")


def _length(status: int, headers: list[Header], names: list[bytes]) -> int | None:
    if status in BODILESS:
        return 0
    return int(headers[names.index(b"content-length")][1]) if b"content-length" in names else None


def with_one_framing(headers: list[Header], names: Sequence[bytes]) -> list[Header]:
    """Return the headers with one that tells the body's end: of equal lengths one, and none beside chunks."""
    if b"transfer-encoding" in names:
        if {value.strip(b" \t").lower() for value in header_values(headers, b"transfer-encoding")} != {b"chunked"}:
            raise BadResponseError("a Transfer-Encoding other than chunked, which nobody asked for")
        if sum(map(names.count, FRAMING)) == 1:
            return headers
        return _replaced(headers, names, (b"Transfer-Encoding", b"chunked"))
    lengths = header_values(headers, b"content-length")
    if len(lengths) > 1 or b"," in lengths[0]:
        lengths = list({length.strip(b" \t") for length in b",".join(lengths).split(b",")})
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > MAX_LENGTH_DIGITS:
        raise BadResponseError("a Content-Length that is not one number")
    if headers[names.index(b"content-length")][1] == lengths[0] and names.count(b"content-length") == 1:
        return headers
    return _replaced(headers, names, (b"Content-Length", lengths[0]))


def _replaced(headers: list[Header], names: Sequence[bytes], framing: Header) -> list[Header]:
    """Return the headers with ``framing`` instead of the first that tells the body's end, and without the others."""
    first = min(at for at, name in enumerate(names) if name in FRAMING)
    kept = [header for header, name in zip(headers, names, strict=True) if name not in FRAMING]
    return [*kept[:first], framing, *kept[first:]]
