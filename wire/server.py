"""HTTP/1.1 server: connections that pass each request, read by read, to a handler."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from wire.framing import ChunkedBody, FixedBody
from wire.head import FramingError, RequestHead, parse_request_head, serialise_head
from wire.loop import Connection, Turns

__all__ = ["ClientConnection", "RequestHandler", "RequestHead", "Server"]

BACKLOG = 4096
MAX_HEAD_BYTES = 64 * 1024
TLS_HANDSHAKE = b"\x16"
READ_BYTES = 128 * 1024
"""Limit of a read: a large body is relayed read by read while it arrives, as in nginx."""
MAX_PIPELINED_BYTES = 256 * 1024
KEEP_ALIVE_S = 75.0
"""Longest wait of a connection for a request or the end of its head."""
BODY_STALL_S = 300.0
"""Longest pause within a request body, which may hold an upstream connection."""
SWEEP_S = 5.0
LINGER_S = 2.0
"""Time for a client that still sends to read the response before the connection is closed."""
WATCH_S = 0.02
"""Interval of the disconnect check for a client whose reading is paused."""

READ_BUFFER = memoryview(bytearray(READ_BYTES))
"""Read buffer of all connections: bytes are copied out at once."""


class RequestHandler(Protocol):
    """Handler of one request. Must not block; responds by ``write`` and ``finish``, or ``abort``."""

    def request_body(self, raw: bytes, data: bytes) -> None:
        """Handle one read: ``raw`` with chunk framing, for relaying; ``data`` without."""

    def request_end(self) -> None:
        """The request is complete."""

    def client_gone(self) -> None:
        """The client disconnected before the response ended; writes have no effect."""

    def pause_response(self) -> None:
        """Pause: the client reads slower than tokens are written."""

    def resume_response(self) -> None:
        """Resume: the client has read the buffered bytes."""


HandlerFactory = Callable[[RequestHead, "ClientConnection"], RequestHandler]


class ClientConnection(Connection, asyncio.BufferedProtocol):
    """Client connection. Pipelined requests wait for the current response, up to a limit."""

    def __init__(
        self,
        new_handler: HandlerFactory,
        on_closed: Callable[["ClientConnection"], None],
        error_type: str = "proxy_error",
        turns: Turns | None = None,
    ) -> None:
        super().__init__(turns)
        self._new_handler, self._on_closed, self._error_type = new_handler, on_closed, error_type
        self._handler: RequestHandler | None = None
        self._head: RequestHead | None = None
        self._body: FixedBody | ChunkedBody = FixedBody(0)
        self._buffer = b""
        self.busy = self.closing = False
        """``busy``: a request is in progress. ``closing``: the connection closes after it, keep-alive or not."""
        self._advancing = self._lingering = self._response_started = False
        self._watcher: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._idle_since = self._body_since = self._loop.time()

    @property
    def has_more_data(self) -> bool:
        """True if the buffer has more bytes of the request, which the handler gets next."""
        return bool(self._buffer) and not self._body.complete

    def idle_s(self) -> float:
        """Return the time since the last request; 0 during a request."""
        return 0.0 if self.busy else self._loop.time() - self._idle_since

    def stalled_s(self) -> float:
        """Return the time since the last bytes of an incomplete body, while reading is not paused."""
        waiting = self.busy and not self._body.complete and not self._read_paused
        return self._loop.time() - self._body_since if waiting else 0.0

    def check_integrity(self) -> None:
        assert self.busy or self._handler is None, "a handler without a request"
        assert not (self._lingering and self.busy), "a request on a connection that closes"
        assert self.busy or self._body.complete or self._lingering or not self._accepting(), "half a body left behind"

    # Called by the handler.

    def write(self, data: bytes) -> None:
        """Write response bytes, framing included; ignored after the client has disconnected."""
        self._response_started = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def write_informational(self, head: bytes) -> None:
        """Write a 1xx head; the final response may still be an error."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(head)

    def finish(self, *, keep_alive: bool) -> None:
        """End the response; close unless both sides keep the connection alive and the request is complete."""
        head = self._head
        self._end_request()
        keep = keep_alive and head is not None and head.keep_alive and self._body.complete and not self.closing
        if not self._accepting():
            return
        if not keep:
            self._close()
            return
        self.resume_reading()
        self._advance()

    def abort(self) -> None:
        """Abort the connection: the client sees an incomplete response."""
        self._end_request()
        if self.transport is not None:
            self.transport.abort()

    def refuse(self, status: int, reason: str, *, still_sending: bool = False) -> None:
        """Respond with an error in OpenAI's format and close; only before the response has started."""
        self._end_request()
        if self.transport is None or not self._accepting():
            return
        body = json.dumps({"error": {"message": reason, "type": self._error_type, "code": status}}).encode()
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        start_line = b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())
        self.transport.write(serialise_head(start_line, [*headers, (b"Connection", b"close")]) + body)
        self._close(still_sending=still_sending)

    def give_up_body(self) -> None:
        """Give up an incomplete body: refuse the request, or abort a response that has started."""
        self._reject(FramingError("the request's body stopped coming", 408))

    def pause_reading(self) -> None:
        if self.alive and not self._read_paused:
            super().pause_reading()
            self._watcher = self._loop.call_later(WATCH_S, self._watch)

    def resume_reading(self) -> None:
        if self._read_paused:
            self._body_since = self._loop.time()
            if self._watcher is not None:
                self._watcher.cancel()
            super().resume_reading()

    def close_when_idle(self) -> None:
        """Accept no further request: close now, or at the end of the current response."""
        self.closing = True
        if not self.busy and self.transport is not None and not self._lingering:
            self.transport.close()

    # Called by the event loop.

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(READ_BUFFER[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        self._buffer = self._buffer + data if self._buffer else data
        self._advance()
        if len(self._buffer) > MAX_PIPELINED_BYTES:
            self.pause_reading()

    def eof_received(self) -> None:
        """Abort during a response: a half-close counts as a disconnect, since both send the same FIN."""
        if self.busy and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        handler = self._handler
        self._end_request()
        if handler is not None:
            handler.client_gone()
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._handler is not None:
            self._handler.pause_response()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._handler is not None:
            self._handler.resume_response()

    # Request parsing.

    def _advance(self) -> None:
        """Parse the buffer: heads create handlers, bodies go to the handlers, pipelined requests wait."""
        if self._advancing:  # called by a handler within a read: the outer call continues
            return
        self._advancing = True
        try:
            while self._buffer and self._accepting() and not self._yielded:
                if self._handler is None:
                    if not self._parse_head():
                        break
                elif not self._body.complete:
                    self._parse_body(self._handler)
                else:
                    break
        except FramingError as error:
            self._reject(error)
        finally:
            self._advancing = False

    def _parse_head(self) -> bool:
        """Create a handler for the head in the buffer; return False if the head is incomplete."""
        data = self._buffer
        if data[0] in b"\r\n":  # RFC 9112, section 2.2: empty lines before a request are ignored
            data = data.lstrip(b"\r\n")
        end = data.find(b"\r\n\r\n") + 4
        if (end if end >= 4 else len(data)) > MAX_HEAD_BYTES:
            raise FramingError("request head too large", 431)
        if end < 4:
            if data[:1] == TLS_HANDSHAKE:  # an HTTP parser would wait for more bytes
                raise FramingError("a TLS handshake on a port of plain HTTP")
            self._buffer = data
            return False
        self._buffer = data[end:]
        head = parse_request_head(data[:end])
        self._head = head
        self._body = ChunkedBody() if head.framing == "chunked" else FixedBody(head.framing)
        self.busy, self._response_started = True, False
        self._body_since = self._loop.time()
        handler = self._new_handler(head, self)
        if not self.busy:  # the handler responded or refused at once
            return True
        self._handler = handler
        if self._write_paused:
            handler.pause_response()
        if self._body.complete:
            handler.request_end()
        return True

    def _parse_body(self, handler: RequestHandler) -> None:
        data = self._buffer
        self._body_since = self._loop.time()
        raw, body, consumed = self._body.feed(data)
        self._buffer = data[consumed:] if consumed < len(data) else b""
        if self._body.dense:
            self._body.dense = False
            self._yield_turn()
        handler.request_body(raw, body)
        if self._body.complete and self._handler is handler:
            handler.request_end()

    def _continue(self) -> None:
        if self._lingering:
            self._buffer = b""
        self._advance()

    def _reject(self, error: FramingError) -> None:
        """Refuse a malformed request, or abort its started response; the handler gets ``client_gone``."""
        handler = self._handler
        self._end_request()
        if handler is not None:
            handler.client_gone()
        if handler is not None and self._response_started:
            self.abort()
        else:
            self.refuse(error.status, str(error), still_sending=True)

    def _end_request(self) -> None:
        self._handler = None
        self.busy = False
        self._idle_since = self._loop.time()

    def _accepting(self) -> bool:
        return self.alive and not self._lingering

    def _close(self, *, still_sending: bool = False) -> None:
        """Close gracefully: closing with unread bytes would send RST, which may overtake the response."""
        assert self.transport is not None
        still_sending = still_sending or bool(self._buffer) or not self._body.complete
        if not still_sending or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingering = True
        self._buffer = b""
        self.resume_reading()
        self.transport.write_eof()
        self._loop.call_later(LINGER_S, self._end_linger)

    def _end_linger(self) -> None:
        """Abort a lingering connection, but not while the client still reads the response."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self._loop.call_later(LINGER_S, self._end_linger)
        elif self.transport is not None:
            self.transport.abort()

    def _watch(self) -> None:
        if self.transport is None or not self._read_paused or self.transport.is_closing():
            return
        if self.peer_closed:
            self.transport.abort()
        else:
            self._watcher = self._loop.call_later(WATCH_S, self._watch)


class Server:
    """Listener with its connections, which can be drained."""

    def __init__(
        self,
        new_handler: HandlerFactory,
        *,
        body_stall_s: float = BODY_STALL_S,
        error_type: str = "proxy_error",
    ) -> None:
        """``error_type``: type field of the server's error responses."""
        self._new_handler, self._error_type = new_handler, error_type
        self._body_stall_s = body_stall_s
        self._turns = Turns()
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None
        self._none_open = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def listen_on(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, sock=sock, backlog=BACKLOG)
        self._sweep()

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting, wait for responses, abort the remaining ones; return the number of aborted responses."""
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
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

    def _sweep(self) -> None:
        """Abort idle connections, unread responses included, and give up stalled bodies."""
        for connection in list(self._connections):
            if connection.idle_s() > KEEP_ALIVE_S and connection.transport is not None:
                connection.transport.abort()
            elif connection.stalled_s() > self._body_stall_s:
                connection.give_up_body()
        every_s = min(SWEEP_S, self._body_stall_s / 2)
        self._sweeper = asyncio.get_running_loop().call_later(every_s, self._sweep)

    def _accept(self) -> ClientConnection:
        connection = ClientConnection(self._new_handler, self._closed, self._error_type, self._turns)
        self._connections.add(connection)
        self._none_open.clear()
        return connection

    def _closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._none_open.set()
