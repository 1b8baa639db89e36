"""The server half of HTTP/1.1: one connection, its requests one after another, each handed to a handler as it comes."""

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
"""Most bytes of a read: a large body is passed on piece by piece, as nginx does, while its rest comes."""
MAX_PIPELINED_BYTES = 256 * 1024
KEEP_ALIVE_S = 75.0
"""How long a connection may wait for a request, or for the rest of its head."""
BODY_STALL_S = 300.0
"""Longest pause of a request's body; an upstream's connection, say, is held as long."""
SWEEP_S = 5.0
LINGER_S = 2.0
"""How long a client that we close on while it still sends may take to read the answer."""
WATCH_S = 0.02
"""How often a client that is not being read from is looked after."""

READ_BUFFER = memoryview(bytearray(READ_BYTES))
"""Shared by all connections: each takes its bytes out as soon as they are read."""


class RequestHandler(Protocol):
    """Receiver of one request; it must not block, and answers by ``write`` and ``finish``, or ``abort``."""

    def request_body(self, raw: bytes, data: bytes) -> None:
        """Take one read: its bytes to pass on, and without chunk framing."""

    def request_end(self) -> None:
        """The request is complete."""

    def client_gone(self) -> None:
        """The client closed the connection before the response ended. Nothing can be written any more."""

    def pause_response(self) -> None:
        """The client reads slower than the response is written."""

    def resume_response(self) -> None:
        """The client has caught up."""


HandlerFactory = Callable[[RequestHead, "ClientConnection"], RequestHandler]


class ClientConnection(Connection, asyncio.BufferedProtocol):
    """A client's connection. Requests that come while one is being answered wait, up to a bound."""

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
        """Whether a request is in progress, and whether the connection closes after it, whoever wants to keep it."""
        self._advancing = self._lingering = self._response_begun = False
        self._watcher: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._idle_since = self._body_since = self._loop.time()

    @property
    def more_to_come(self) -> bool:
        """Return whether what has been read holds more of the request: its handler hears of it before anything else."""
        return bool(self._buffer) and not self._body.complete

    def idle_s(self) -> float:
        """For how long no request has been in progress; 0 during one."""
        return 0.0 if self.busy else self._loop.time() - self._idle_since

    def stalled_s(self) -> float:
        """For how long the rest of a request's body has not come, although it would have been read."""
        waiting = self.busy and not self._body.complete and not self._read_paused
        return self._loop.time() - self._body_since if waiting else 0.0

    def check_integrity(self) -> None:
        assert self.busy or self._handler is None, "a handler without a request"
        assert not (self._lingering and self.busy), "a request on a connection that closes"
        assert self.busy or self._body.complete or self._lingering or not self._accepting(), "half a body left behind"

    # What the handler calls.

    def write(self, data: bytes) -> None:
        """Write response bytes, framing and all. What is written after the client has gone is dropped."""
        self._response_begun = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def write_informational(self, head: bytes) -> None:
        """Write a 1xx head: the response has not begun with it, and can still be a refusal."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(head)

    def finish(self, *, keep_alive: bool) -> None:
        """End the response; the connection closes unless both sides keep it, or if the request has not ended yet."""
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
        """Cut the connection: the client sees a response that did not end."""
        self._end_request()
        if self.transport is not None:
            self.transport.abort()

    def refuse(self, status: int, reason: str, *, still_sending: bool = False) -> None:
        """Answer with an error in the shape of OpenAI's and close. For when no response has begun."""
        self._end_request()
        if self.transport is None or not self._accepting():
            return
        body = json.dumps({"error": {"message": reason, "type": self._error_type, "code": status}}).encode()
        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        start_line = b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())
        self.transport.write(serialise_head(start_line, [*headers, (b"Connection", b"close")]) + body)
        self._close(still_sending=still_sending)

    def give_up_body(self) -> None:
        """The rest of the request's body will not come: refuse it, or cut a response that has begun."""
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
        """Take no further request: close now, or when the response in progress has ended."""
        self.closing = True
        if not self.busy and self.transport is not None and not self._lingering:
            self.transport.close()

    # What the event loop calls.

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
        """Cut the connection during a response: half a close counts as a whole one, as one that has gone sends it."""
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

    # One request after another.

    def _advance(self) -> None:
        """Go through the buffer: heads open handlers, bodies go to them, a request waits until it is its turn."""
        if self._advancing:  # a handler that answers from within a read: that read goes on by itself
            return
        self._advancing = True
        try:
            while self._buffer and self._accepting() and not self._on_break:
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
        data = self._buffer
        if data[0] in b"\r\n":  # RFC 9112, section 2.2: empty lines before a request are ignored
            data = data.lstrip(b"\r\n")
        end = data.find(b"\r\n\r\n") + 4
        if (end if end >= 4 else len(data)) > MAX_HEAD_BYTES:
            raise FramingError("request head too large", 431)
        if end < 4:
            if data[:1] == TLS_HANDSHAKE:  # else it would wait for more
                raise FramingError("a TLS handshake on a port of plain HTTP")
            self._buffer = data
            return False
        self._buffer = data[end:]
        head = parse_request_head(data[:end])
        self._head = head
        self._body = ChunkedBody() if head.framing == "chunked" else FixedBody(head.framing)
        self.busy, self._response_begun = True, False
        self._body_since = self._loop.time()
        handler = self._new_handler(head, self)
        if not self.busy:  # answered or refused from within
            return True
        self._handler = handler
        if self._write_paused:
            handler.pause_response()
        if self._body.complete:
            handler.request_end()
        return True

    def _take_body(self, handler: RequestHandler) -> None:
        data = self._buffer
        self._body_since = self._loop.time()
        raw, body, taken = self._body.feed(data)
        self._buffer = data[taken:] if taken < len(data) else b""
        if self._body.dense:
            self._body.dense = False
            self._take_break()
        handler.request_body(raw, body)
        if self._body.complete and self._handler is handler:
            handler.request_end()

    def _go_on(self) -> None:
        if self._lingering:
            self._buffer = b""
        self._advance()

    def _reject(self, error: FramingError) -> None:
        """Refuse a malformed request, or cut its response if that has begun; its handler hears of a client gone."""
        handler = self._handler
        self._end_request()
        if handler is not None:
            handler.client_gone()
        if handler is not None and self._response_begun:
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
        """Close so that the client can read the response: a reset for bytes on their way would overtake it."""
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
        """Cut what lingers, but not while the client still reads the response."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self._loop.call_later(LINGER_S, self._end_linger)
        elif self.transport is not None:
            self.transport.abort()

    def _watch(self) -> None:
        """While reading is paused, see whether the client is still there."""
        if self.transport is None or not self._read_paused or self.transport.is_closing():
            return
        if self.left:
            self.transport.abort()
        else:
            self._watcher = self._loop.call_later(WATCH_S, self._watch)


class Server:
    """Listens, and knows its connections, so that they can be drained."""

    def __init__(
        self,
        new_handler: HandlerFactory,
        *,
        body_stall_s: float = BODY_STALL_S,
        error_type: str = "proxy_error",
    ) -> None:
        """``error_type``: of the errors that the server itself answers with."""
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
        """Accept connections from a socket that is bound already."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, sock=sock, backlog=BACKLOG)
        self._sweep()

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting, let responses in progress end, cut those that do not; returns how many were cut."""
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
        """Cut idle connections, unread responses included, and give up bodies that have waited too long."""
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
