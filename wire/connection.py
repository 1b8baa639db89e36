"""The client half of HTTP/1.1: a connection to a server, one exchange at a time."""

import asyncio
import re
from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol, cast

import httptools
import msgspec

from wire.errors import LossKind
from wire.hangup import Hangup
from wire.head import HOP_BY_HOP, Header, header_values

MAX_HEAD_BYTES = 64 * 1024
STALE_WITHIN_NS = 1_000_000_000
"""A server that closed an idle connection shows within a round trip; one that dies later had begun to work on it."""
CONTINUE, SWITCHING_PROTOCOLS, OK = 100, 101, 200
CONTROL_BYTE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Of those the parser lets some pass in a reason phrase, for which clients give up the whole response."""
BODILESS = frozenset({204, 304})


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
    more: bool
    """Of a final head: the same read holds more of the response, or its end; the sink hears of it at once."""

    @property
    def passes(self) -> bool:
        """Return whether it means for the next hop what it means for this one, byte for byte."""
        return self.raw.startswith(b"HTTP/1.1 ") and HOP_BY_HOP.isdisjoint(self.names) and not self.until_close

    @property
    def informational(self) -> bool:
        """A 1xx response: another head follows."""
        return self.status < OK

    @property
    def until_close(self) -> bool:
        """Return whether nothing but the connection's end will tell where the body ends."""
        return not (self.status in BODILESS or b"content-length" in self.names or b"transfer-encoding" in self.names)


class ResponseSink(Protocol):
    """Receiver of one exchange, called from within the read: no method may block."""

    def response_head(self, head: ResponseHead) -> None:
        """A head is complete. Informational ones come first, if any."""

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Take one read: its bytes as on the wire, and without chunk framing."""

    def response_end(self) -> None:
        """The response is complete. The connection is already free for others."""

    def response_lost(self, kind: LossKind) -> None:
        """The exchange ended before its response did. The connection is closed."""

    def pause_request(self) -> None:
        """The server reads slower than the body is written."""

    def resume_request(self) -> None:
        """The server has caught up."""


class ServerConnection(asyncio.Protocol):
    """Connection to a server: ``start`` an exchange, and the sink hears of all. A relay writes on the raw bytes."""

    def __init__(
        self, on_idle: Callable[["ServerConnection"], None], on_closed: Callable[["ServerConnection"], None]
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchanges = 0
        self.waited = False
        """Whether it lay idle before its exchange: the server may have closed it meanwhile."""
        self._started_ns = self._lost_ns = 0
        self._on_idle, self._on_closed = on_idle, on_closed
        self._sink: ResponseSink | None = None
        self._hangup: Hangup | None = None
        self._write_paused = False
        self._head_only = False
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        """What the parser calls with each piece of the body without its framing."""
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._head_bytes = b""
        self._head: ResponseHead | None = None
        self._answered = False
        self._new_message()

    def _new_message(self) -> None:
        self._headers: list[Header] = []
        self._names: list[bytes] = []
        self._reason = b""
        self._complete = False
        self._keep_alive = False
        self._overrun = False

    @property
    def stale(self) -> bool:
        """Return whether the server closed the connection idle: no byte came, within a second, and may be repeated."""
        return self.waited and not self._answered and 0 < self._lost_ns - self._started_ns < STALE_WITHIN_NS

    @property
    def usable(self) -> bool:
        return self._sink is None and self.transport is not None and not self.transport.is_closing()

    @property
    def left(self) -> bool:
        """Return whether the server has closed it, told of that by the loop or not. One system call."""
        return self._hangup is None or self._hangup.seen()

    def start(self, request: bytes, sink: ResponseSink, *, head_only: bool = False) -> None:
        """Write a request's head (and body, as far as it is known) and tell ``sink`` of the response."""
        assert self._sink is None, "a connection carries one exchange at a time"
        assert self.transport is not None
        self._reset()
        self._sink, self._head_only = sink, head_only
        self.exchanges += 1
        self._started_ns, self._lost_ns = perf_counter_ns(), 0
        self.transport.write(request)
        if self._write_paused:
            sink.pause_request()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading the response until ``resume_reading``: whoever takes it is slower than the server."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        """Drop the connection at once and tell the sink nothing more."""
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._hangup = Hangup(transport)

    def data_received(self, data: bytes) -> None:
        at_ns = perf_counter_ns()
        sink = self._sink
        if sink is None:  # a server that speaks without being asked cannot be trusted with a request
            self.abort()
            return
        try:
            if self._head is None:
                self._answered = True
                rest = self._take_heads(sink, data)
                if rest is None:
                    return
                data = rest
            if data and self._complete:  # a body where there can be none: what follows it cannot be trusted
                self._keep_alive = False
            elif data:
                self._take_body(sink, at_ns, data)
        except (BadResponseError, httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._lose("bad_response")
            return
        if self._complete:
            self._finish()

    def eof_received(self) -> None:
        """The server has no more to say; ``connection_lost`` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = self._hangup = None
        if self._sink is not None:
            if self._head is not None and self._head.until_close and exc is None:
                sink, self._sink = self._sink, None
                sink.response_end()
            else:
                self._lose("upstream_closed")
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._sink is not None:
            self._sink.pause_request()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._sink is not None:
            self._sink.resume_request()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Notice a message that nobody asked for, behind the one that is complete."""
        self._overrun = self._complete

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        self._names.append(name.lower())

    def on_message_complete(self) -> None:
        """The framing says that the message ends here; only now does the parser know whether the connection stays."""
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # One exchange, step by step.

    def _take_heads(self, sink: ResponseSink, data: bytes) -> bytes | None:
        """Consume heads up to the final one; returns the bytes behind it. None: it is not all there, or not wanted."""
        rest = self._head_bytes + data if self._head_bytes else data
        while self._head is None:
            if rest[:1] in {b"\r", b"\n"}:  # an empty line too many, behind the last response or before this one
                rest = rest.lstrip(b"\r\n")
            end = rest.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(rest) > MAX_HEAD_BYTES:
                    raise BadResponseError("response head too large")
                self._head_bytes = rest
                return None
            head_bytes, rest = rest[:end], rest[end:]
            head = self._parse_head(head_bytes, more=bool(rest))
            if head.status == SWITCHING_PROTOCOLS:
                raise BadResponseError("protocol switch that nobody asked for")
            if head.informational:
                self._new_message()
            else:
                self._head = head
            sink.response_head(head)
            if self._sink is None:  # aborted from within
                return None
        self._head_bytes = b""
        return rest

    def _parse_head(self, data: bytes, *, more: bool) -> ResponseHead:
        parser = self._parser
        parser.feed_data(data)
        headers, names = self._headers, self._names
        self._headers, self._names = [], []  # what comes later are trailers
        version, status = parser.get_http_version(), parser.get_status_code()
        if not data.startswith(b"HTTP/1.") or status < CONTINUE or CONTROL_BYTE.search(self._reason):
            raise BadResponseError("not the head of an HTTP/1 response")
        if b"transfer-encoding" in names:
            codings = [value.strip(b" \t").lower() for value in header_values(headers, b"transfer-encoding")]
            if codings != [b"chunked"]:
                raise BadResponseError("a Transfer-Encoding other than chunked, which nobody asked for")
        if self._head_only and status >= OK and not self._complete:
            self.on_message_complete()
            self._parser = httptools.HttpResponseParser(self)  # this one waits for the body that the head speaks of
        return ResponseHead(version, status, self._reason, headers, names, data, more or self._complete)

    def _take_body(self, sink: ResponseSink, at_ns: int, raw: bytes) -> None:
        if raw[0] in b"\r\n" and not raw.strip(b"\r\n"):
            raw = self._feed_line_ends(raw)
        else:
            self._parser.feed_data(raw)
            if self._complete:
                raw = self._without_stray_lines(raw)
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._overrun:
            raise BadResponseError("bytes behind the end of the response")
        sink.response_body(at_ns, raw, data)

    def _without_stray_lines(self, raw: bytes) -> bytes:
        """Return the read without empty lines behind the response, which would be taken for the next beginning."""
        assert self._head is not None
        if b"transfer-encoding" in self._head.names:
            whole = raw.rstrip(b"\r\n") + b"\r\n\r\n"
        else:
            whole = raw[: sum(map(len, self._pieces))]
        if len(whole) < len(raw):
            self._keep_alive = False
        return whole

    def _feed_line_ends(self, raw: bytes) -> bytes:
        """The same for a read of nothing but line ends, where only the parser can tell which of them is the last."""
        for at in range(len(raw)):
            self._parser.feed_data(raw[at : at + 1])
            if self._complete:
                self._keep_alive = self._keep_alive and at + 1 == len(raw)
                return raw[: at + 1]
        return raw

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        head = self._head
        reusable = self._keep_alive and head is not None and not head.until_close
        if reusable and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
            self._on_idle(self)
        elif self.transport is not None:
            self.transport.close()
        if sink is not None:
            sink.response_end()

    def _lose(self, kind: LossKind) -> None:
        sink, self._sink = self._sink, None
        self._lost_ns = perf_counter_ns()
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.response_lost(kind)
