"""One client's connection: requests taken apart as they come and answered one after another, no task in between.

httptools refuses what is no HTTP/1.1; bounds on heads, bodies and pipelined requests are here.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import cast

import httptools

from sim.serving.exchange import JSON_TYPE, Exchange, HttpRequest, head_bytes

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_WAITING = 32
"""Requests of one connection that may wait for their turn."""
HOP_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
_NO_LINGER = struct.pack("ii", 1, 0)


Handler = Callable[[HttpRequest, Exchange], None]


class Connection(asyncio.Protocol):
    """Parses requests and hands each, complete, to ``handle`` when the one before it has been answered."""

    def __init__(self, handle: Handler, on_closed: Callable[["Connection"], None]) -> None:
        self._handle, self._on_closed = handle, on_closed
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._request: HttpRequest | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._in_head = True
        self._waiting: deque[HttpRequest] = deque()
        self._exchange: Exchange | None = None
        self._advancing = self._closing = self._reading_paused = False
        self._ended_in_read = False
        """Whether the latest read held a request's end: then not all of it is of the head that follows."""
        self._refusal: tuple[int, str] | None = None
        self._read_ns = self.last_ns = perf_counter_ns()
        self.writing_paused = False

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or waits."""
        return self._exchange is not None or bool(self._waiting)

    def close_when_idle(self) -> None:
        """Take no further request; close when the one in progress has been answered."""
        self._closing = True
        if self._exchange is None and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection; nothing is written to it any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # What an exchange calls.

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        if self._transport is not None:
            self._transport.write(data)

    def finish(self, *, keep_alive: bool) -> None:
        """The response has ended; the next request has its turn."""
        self._exchange = None
        self.last_ns = perf_counter_ns()
        if self._transport is None or self._transport.is_closing():
            return
        if not keep_alive or self._closing:
            self._transport.close()
            return
        if self._reading_paused and len(self._waiting) < MAX_WAITING:
            self._reading_paused = False
            self._transport.resume_reading()
        self._advance()

    def reset(self) -> None:
        """Close with a TCP reset."""
        self._exchange = None
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take one read."""
        self._read_ns = self.last_ns = perf_counter_ns()
        self._ended_in_read = False
        if self._refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refusal = self._refusal or (400, "a malformed request")
        if self._in_head and self._request is not None and not self._ended_in_read:
            self._grow(len(data), MAX_HEAD_BYTES, (431, "the request's head is too large"))
        self._advance()

    def eof_received(self) -> None:
        """The client has closed; half a close is taken for a whole one, as it looks the same from here."""
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is answering."""
        self._transport = None
        self._waiting.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lose()
        self._on_closed(self)

    def pause_writing(self) -> None:
        """The client reads slower than is written."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.writing_paused = False
        if self._exchange is not None and self._exchange.on_writable is not None:
            self._exchange.on_writable()

    # What httptools calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        self._request = HttpRequest(self._read_ns)
        self._parts, self._size, self._in_head = [], 0, True

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if self._request is not None:
            self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if self._request is not None:
            self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head, self._size = False, 0
        request = self._request
        if request is None:
            return
        request.method = self._parser.get_method()
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        if self._exchange is None and (request.header(b"expect") or "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._grow(len(data), MAX_BODY_BYTES, (413, "the request's body is too large")):
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The request is complete."""
        request, self._request = self._request, None
        self._ended_in_read = True
        if request is None or self._refusal is not None:
            return
        request.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._in_head = [], True
        self._waiting.append(request)
        if len(self._waiting) >= MAX_WAITING and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _stay(self, rest: bytes) -> None:
        """Take a request for another protocol as one in this: httptools gives up at its head, and leaves the body."""
        if self._refusal is None and self._waiting:
            request = self._waiting.pop()
            headers = [header for header in request.headers if header[0] not in HOP_HEADERS]
            if not request.keep_alive:
                headers.append((b"connection", b"close"))
            lines = [b"%b %b HTTP/%b\r\n" % (request.method, request.target, request.version.encode())]
            lines += [b"%b: %b\r\n" % header for header in headers]
            self._parser = httptools.HttpRequestParser(self)
            self.data_received(b"".join([*lines, b"\r\n", rest]))

    def _grow(self, size: int, limit: int, refusal: tuple[int, str]) -> bool:
        """Count bytes of a head or body; False, and the request is refused, beyond the limit."""
        self._size += size
        if self._size > limit:
            self._refusal = self._refusal or refusal
            self._parts = []
        return self._size <= limit

    def _advance(self) -> None:
        """Hand over the next request, and the next, while they are answered at once."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._exchange is None and self._waiting and self._transport is not None and not self._closing:
                request = self._waiting.popleft()
                exchange = self._exchange = Exchange(self, request)
                self._handle(request, exchange)
        finally:
            self._advancing = False
        if self._refusal is not None and self._exchange is None and self._transport is not None:
            self._refuse(*self._refusal)

    def _refuse(self, status: int, reason: str) -> None:
        assert self._transport is not None
        body = b'{"error":{"message":"%b","type":"BadRequestError","param":null,"code":%d}}' % (reason.encode(), status)
        headers = [JSON_TYPE, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.write(head_bytes(status, headers) + body)
        self._transport.close()
