"""A request's head: what it says, and a parse that refuses whatever two servers could read differently."""

from time import perf_counter_ns

import httptools
import msgspec

from wire.framing import FramingError
from wire.head import Header, header_values, keeps_alive

# A gateway that turns headers into variables (CGI, WSGI) reads these as the framing headers that they look like.
FRAMING_LOOKALIKES = frozenset({b"content_length", b"transfer_encoding"})

BEYOND_ASCII = bytes(range(128)) + b"x" * 128
"""Translation of bytes that stand in a target for themselves, but that the parser refuses."""
SCHEMES = (b"http://", b"https://")


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
    upgrade: bool
    """The client wants another protocol, such as WebSocket."""

    @property
    def keep_alive(self) -> bool:
        return keeps_alive(self.version, self.headers, self.names)

    def values(self, name: bytes) -> list[bytes]:
        return header_values(self.headers, name)


class _HeadParser:
    """Collects what httptools finds in one request head."""

    __slots__ = ("complete", "headers", "names", "target")

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.names: list[bytes] = []
        self.target = b""
        self.complete = 0

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self.names.append(name.lower())

    def on_headers_complete(self) -> None:
        self.complete += 1


def parse_request_head(data: bytes) -> RequestHead:
    """Read a complete head. Raises FramingError for one that HTTP/1.1 does not allow."""
    at_ns = perf_counter_ns()
    parser, found, upgrade = _parse(data)
    version = parser.get_http_version()
    if version not in {"1.0", "1.1"}:
        raise FramingError("an HTTP version other than 1.0 and 1.1", 505)
    if found.complete != 1:
        raise FramingError("a request head that ends elsewhere than it seems to")
    method, target = parser.get_method(), data[len(parser.get_method()) + 1 :][: len(found.target)]
    if not data.startswith(b"%b %b HTTP/%b\r\n" % (method, target, version.encode())):
        raise FramingError("a request line of another protocol, or spaced out")
    _check_target(method, target)
    _check_names(found.names, version)
    return RequestHead(at_ns, method, target, version, found.headers, found.names, upgrade)


def _parse(data: bytes) -> tuple[httptools.HttpRequestParser, _HeadParser, bool]:
    """Return the parser of a head, its findings, and whether the client wants another protocol."""
    found = _HeadParser()
    parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return parser, found, True
    except httptools.HttpParserError as error:
        line, end, rest = data.partition(b"\r\n")
        if not line.isascii():  # a path in UTF-8, say, of which the parser knows nothing
            return _parse(line.translate(BEYOND_ASCII) + end + rest)
        raise FramingError(f"a malformed request ({type(error).__name__})") from None
    return parser, found, False


def _check_target(method: bytes, target: bytes) -> None:
    """Refuse what is neither a path, nor a URL as proxies get it, nor OPTIONS' and CONNECT's own forms."""
    if target.startswith(b"/") or target[:8].lower().startswith(SCHEMES) or method == b"CONNECT":
        return
    if (method, target) != (b"OPTIONS", b"*"):
        raise FramingError("a target that is neither a path nor an http URL")


def _check_names(names: list[bytes], version: str) -> None:
    """Refuse headers, by their lower-case names, of which the next server could make another message."""
    hosts = names.count(b"host")
    if hosts > 1 or (version == "1.1" and hosts == 0):
        raise FramingError("not exactly one Host header")
    if version == "1.0" and b"transfer-encoding" in names:
        raise FramingError("a Transfer-Encoding in HTTP/1.0, which has none")
    if not FRAMING_LOOKALIKES.isdisjoint(names):
        raise FramingError("a header that only looks like Content-Length or Transfer-Encoding")
