"""The server half of HTTP/1.1: one connection, its requests one after another, each handed to a handler as it comes."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter_ns
from typing import Protocol, cast

import httptools

from wire.framing import ChunkedBody, FixedBody, FramingError, body_framing
from wire.head import Header, connection_options, header_values, serialise_head

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Request line and headers as they came: order, case and duplicates kept."""

    at_ns: int
    """When the head was complete (``perf_counter_ns``)."""
    method: bytes
    target: bytes
    """Path and query, byte for byte."""
    version: str
    headers: list[Header]
    upgrade: bool
    """The client wants another protocol, such as WebSocket."""

    @property
    def keep_alive(self) -> bool:
        """Whether the client will send another request on this connection."""
        options = connection_options(self.headers)
        return b"close" not in options if self.version == "1.1" else b"keep-alive" in options

    def values(self, name: bytes) -> list[bytes]:
        """All values of the header ``name`` (lower case)."""
        return header_values(self.headers, name)


class RequestHandler(Protocol):
    """Whom a connection tells of one request, from within the read itself: nothing here may block.

    It answers through the connection: ``write`` and then ``finish``, or ``abort``.
    """

    def request_body(self, raw: bytes, data: bytes) -> None:
        """One read: its bytes as they were on the wire, and the same without chunk framing."""

    def request_end(self) -> None:
        """The request is complete."""

    def client_gone(self) -> None:
        """The client closed the connection before the response ended. Nothing can be written any more."""

    def pause_response(self) -> None:
        """The client reads slower than the response is written."""

    def resume_response(self) -> None:
        """The client has caught up."""


HandlerFactory = Callable[[RequestHead, "ClientConnection"], RequestHandler]


class ClientConnection(asyncio.Protocol):
    """A client's connection. Requests that come while one is being answered wait, up to a bound."""

    def __init__(self, new_handler: HandlerFactory, on_closed: Callable[["ClientConnection"], None]) -> None:
        self._new_handler, self._on_closed = new_handler, on_closed
        self.transport: asyncio.Transport | None = None
        self._handler: RequestHandler | None = None
        self._head: RequestHead | None = None
        self._body: FixedBody | ChunkedBody = FixedBody(0)
        self._buffer = b""
        self._write_paused = False
        self._reading_paused = False
        self._closing = False
        self._advancing = False

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._handler is not None

    # What the handler calls.

    def write(self, data: bytes) -> None:
        """Write response bytes, framing and all. What is written after the client has gone is dropped."""
        if self.transport is not None:
            self.transport.write(data)

    def finish(self, *, keep_alive: bool) -> None:
        """The response is complete. The connection closes unless client and handler both want to keep it.

        A response that ends before its request does closes it too: what is still to come would be read as a request.
        """
        head, self._handler = self._head, None
        keep = keep_alive and head is not None and head.keep_alive and self._body.complete and not self._closing
        if self.transport is None or self.transport.is_closing():
            return
        if not keep:
            self.transport.close()
            return
        self.resume_reading()
        self._advance()

    def abort(self) -> None:
        """Cut the connection: the client sees a response that did not end."""
        self._handler = None
        if self.transport is not None:
            self.transport.abort()

    def refuse(self, status: int, reason: str) -> None:
        """Answer with an error in the shape of OpenAI's and close. For when no response has begun."""
        self._handler = None
        if self.transport is None:
            return
        phrase = HTTPStatus(status).phrase.encode()
        body = b'{"error": {"message": "%b", "type": "proxy_error", "code": %d}}' % (reason.encode(), status)
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        head = serialise_head(b"HTTP/1.1 %d %b" % (status, phrase), [*headers, (b"Connection", b"close")])
        self.transport.write(head + body)
        self.transport.close()

    def pause_reading(self) -> None:
        """Stop reading the request until ``resume_reading``: whoever takes its body is slower than the client."""
        if self.transport is not None and not self.transport.is_closing() and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing() and self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def close_when_idle(self) -> None:
        """Take no further request: close now, or when the response in progress has ended."""
        self._closing = True
        if not self.busy and self.transport is not None:
            self.transport.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take one read: of a head, of a body, or of a request whose turn has not come."""
        self._buffer = self._buffer + data if self._buffer else data
        self._advance()
        if len(self._buffer) > MAX_PIPELINED_BYTES:
            self.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler that nobody listens any more."""
        self.transport = None
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.client_gone()
        self._on_closed(self)

    def pause_writing(self) -> None:
        """The send buffer is full."""
        self._write_paused = True
        if self._handler is not None:
            self._handler.pause_response()

    def resume_writing(self) -> None:
        """The send buffer has drained."""
        self._write_paused = False
        if self._handler is not None:
            self._handler.resume_response()

    # One request after another.

    def _advance(self) -> None:
        """Go through the buffer: heads open handlers, bodies go to them, a request waits until it is its turn."""
        if self._advancing:  # a handler that answers from within a read: that read goes on by itself
            return
        self._advancing = True
        try:
            while self._buffer and self.transport is not None and not self.transport.is_closing():
                if self._handler is None:
                    if not self._take_head():
                        break
                elif not self._body.complete:
                    self._take_body(self._handler)
                else:
                    break
        except FramingError as error:
            self._reject(error)
        finally:
            self._advancing = False

    def _take_head(self) -> bool:
        """Open a handler for the head in the buffer; False if it is not all there."""
        data = self._buffer.lstrip(b"\r\n")  # RFC 9112, section 2.2: empty lines before a request are ignored
        end = data.find(b"\r\n\r\n") + 4
        if max(end, 0 if end >= 4 else len(data)) > MAX_HEAD_BYTES:
            raise FramingError("request head too large", 431)
        if end < 4:
            return False
        self._buffer = data[end:]
        head = parse_request_head(data[:end])
        framing = body_framing(head.headers)
        self._head = head
        self._body = ChunkedBody() if framing == "chunked" else FixedBody(framing)
        handler = self._new_handler(head, self)
        if self.transport is None or self.transport.is_closing():  # refused from within
            return False
        self._handler = handler
        if self._write_paused:
            handler.pause_response()
        if self._body.complete:
            handler.request_end()
        return True

    def _take_body(self, handler: RequestHandler) -> None:
        data = self._buffer
        body, taken = self._body.feed(data)
        self._buffer = data[taken:]
        handler.request_body(data[:taken], body)
        if self._body.complete and self._handler is handler:
            handler.request_end()

    def _reject(self, error: FramingError) -> None:
        """Refuse a malformed request; one whose handler has begun is told that its client is gone."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.client_gone()
            self.abort()
        else:
            self.refuse(error.status, str(error))


class _HeadParser:
    """Collects what httptools finds in one request head."""

    __slots__ = ("headers", "target")

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.target = b""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))


def parse_request_head(data: bytes) -> RequestHead:
    """Read a complete head. Raises FramingError for one that HTTP/1.1 does not allow."""
    at_ns = perf_counter_ns()
    found = _HeadParser()
    parser = httptools.HttpRequestParser(found)
    upgrade = False
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        upgrade = True
    except httptools.HttpParserError as error:
        raise FramingError(f"a malformed request ({type(error).__name__})") from None
    version = parser.get_http_version()
    if version not in {"1.0", "1.1"}:
        raise FramingError("an HTTP version other than 1.0 and 1.1", 505)
    if version == "1.1" and len(header_values(found.headers, b"host")) != 1:
        raise FramingError("not exactly one Host header")
    return RequestHead(at_ns, parser.get_method(), found.target, version, found.headers, upgrade)


class Server:
    """Listens, and knows its connections, so that they can be drained."""

    def __init__(self, new_handler: HandlerFactory) -> None:
        self._new_handler = new_handler
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None
        self._none_open = asyncio.Event()

    @property
    def num_connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    async def listen(self, host: str, port: int) -> int:
        """Accept connections; returns the port. Raises OSError if the address is taken or not ours."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, host, port, backlog=1024)
        return int(self._listener.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting, let responses in progress end, cut those that do not; returns how many were cut."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close_when_idle()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._none_open.wait()
        cut = [connection for connection in self._connections if connection.busy]
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
        return len(cut)

    def _accept(self) -> ClientConnection:
        connection = ClientConnection(self._new_handler, self._closed)
        self._connections.add(connection)
        self._none_open.clear()
        return connection

    def _closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._none_open.set()
