"""HTTP/1.1 client connection, one exchange at a time; stamps each read with the arrival time of its tokens."""

import asyncio
import re
import ssl
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Protocol

from wire.errors import LossKind
from wire.framing import ChunkedBody, FixedBody
from wire.head import SWITCHING_PROTOCOLS, FramingError, ResponseHead, parse_response_head
from wire.loop import Connection, Turns

__all__ = ["ResponseHead", "ResponseSink", "ServerConnection"]

EMPTY_LINES = re.compile(rb"[\r\n]+")
HEAD_END = re.compile(rb"\n\r?\n")
MAX_HEAD_BYTES = 64 * 1024
MAX_INFORMATIONAL = 100
"""Limit of 1xx responses before the final response."""
HEAD_WAIT_S = 75.0
"""Timeout of an incomplete head. Before its first byte, a server may take any time, such as a long prefill."""
LARGE_BODY_BYTES = 32 * 1024
"""Size from which ``writelines`` of head and body is faster than joining them."""
STALE_WITHIN_NS = 1_000_000_000
"""Limit for a stale connection: the close of an idle connection arrives within a round trip."""


class ResponseSink(Protocol):
    """Receiver of one response, called within the read callback; must not block."""

    def response_head(self, head: ResponseHead) -> None:
        """Handle a complete head; informational heads come first."""

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Handle one read. ``at_ns``: arrival time of its tokens. ``raw``: with chunk framing; ``data``: without."""

    def response_end(self) -> None:
        """The response is complete; the connection is already idle."""

    def response_lost(self, kind: LossKind) -> None:
        """The connection was lost before the end of the response."""

    def pause_request(self) -> None:
        """Pause: the server reads slower than the request body is written."""

    def resume_request(self) -> None:
        """Resume: the server has read the buffered bytes."""


class ServerConnection(Connection, asyncio.Protocol):
    """Connection to a server: ``start`` sends a request, and the sink gets each read with its token arrival time."""

    def __init__(
        self,
        on_idle: Callable[["ServerConnection"], None],
        on_closed: Callable[["ServerConnection"], None],
        turns: Turns | None = None,
    ) -> None:
        super().__init__(turns)
        self.waited = False
        """True: the connection was idle before the exchange, and the server may have closed it meanwhile."""
        self._started_ns = self._lost_ns = 0
        self._on_idle, self._on_closed = on_idle, on_closed
        self._sink: ResponseSink | None = None
        self._head_only = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._unread = b""
        """Incomplete head, or bytes for the connection's next turn."""
        self._head: ResponseHead | None = None
        self._body: FixedBody | ChunkedBody = FixedBody(0)
        self._num_informational = 0
        self._answered = False
        self.has_more_data = False
        """True: the read with the final head has body bytes or the end of the response, which follow at once."""
        self.malformed = False
        """True: the response violates the framing rules, although its end is certain."""

    @property
    def stale(self) -> bool:
        """True if the server closed the idle connection: no byte arrived, so that the request may be repeated."""
        return self.waited and not self._answered and 0 < self._lost_ns - self._started_ns < STALE_WITHIN_NS

    @property
    def usable(self) -> bool:
        return self._sink is None and self.alive

    def start(self, request: bytes, sink: ResponseSink, *, body: Sequence[bytes] = (), head_only: bool = False) -> None:
        """Write a request head, and body bytes if known; ``sink`` gets the response."""
        assert self._sink is None, "a connection carries one exchange at a time"
        assert self.transport is not None
        self._reset()
        self._sink, self._head_only = sink, head_only
        self._started_ns, self._lost_ns = perf_counter_ns(), 0
        if not body:
            self.transport.write(request)
        elif sum(map(len, body)) < LARGE_BODY_BYTES:
            self.transport.write(b"".join((request, *body)))
        else:
            self.transport.writelines((request, *body))
        if self._write_paused:
            sink.pause_request()

    def write(self, data: bytes) -> None:
        if self.transport is not None and data:
            self.transport.write(data)

    def abort(self) -> None:
        """Abort the connection; the sink gets no further calls."""
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    # Called by the event loop.

    def data_received(self, data: bytes) -> None:
        at_ns = perf_counter_ns()  # arrival time of the tokens in this read: TTFT and ITL are differences of it
        sink = self._sink
        if sink is None:  # a server that sends without a request cannot be trusted
            self.abort()
        elif self._head is None:
            self._parse_heads(sink, at_ns, data)
        elif self._yielded:
            self._unread += data
        elif (piece := self._body.single_chunk(data)) is not None:
            sink.response_body(at_ns, data, piece)
        else:
            self._parse_body(sink, at_ns, data, with_head=False)

    def eof_received(self) -> None:
        """The server sends no more; ``connection_lost`` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        while self._yielded and self._sink is not None:  # bytes that have arrived count
            self._resume_turn()
        self._stop_head_timer()
        self.transport = None
        if self._sink is not None:
            if self._head is not None and self._head.until_close and exc is None:
                sink, self._sink = self._sink, None
                sink.response_end()
            else:
                # In TLS 1.3 a client certificate is refused only after the client's handshake.
                refused = isinstance(exc, ssl.SSLError) and not self._answered
                self._lose("tls_failed" if refused else "upstream_closed")
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._sink is not None:
            self._sink.pause_request()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._sink is not None:
            self._sink.resume_request()

    # Response parsing.

    def _parse_body(self, sink: ResponseSink, at_ns: int, data: bytes, *, with_head: bool) -> None:
        """Parse body bytes; the sink gets equal data however the reads are split."""
        body = self._body
        try:
            raw, piece, consumed = body.feed(data)
        except FramingError:
            self._lose("bad_response")
            return
        if raw or with_head:
            sink.response_body(at_ns, raw, piece)
        if body.complete:
            self._finish(behind=data[consumed:])
        elif body.dense:
            body.dense = False
            self._unread = data[consumed:]
            self._yield_turn()

    def _continue(self) -> None:
        unread, self._unread = self._unread, b""
        if self._sink is not None and unread:
            self._parse_body(self._sink, perf_counter_ns(), unread, with_head=False)

    def _parse_heads(self, sink: ResponseSink, at_ns: int, data: bytes) -> None:
        """Parse heads up to the final head, then body bytes of the same read."""
        self._answered = True
        searched = max(0, len(self._unread) - 2)
        data, self._unread = self._unread + data, b""
        at = 0
        try:
            while self._head is None and self._sink is not None:
                if (empty := EMPTY_LINES.match(data, at)) is not None:  # empty lines before the response
                    at = empty.end()
                head_end = HEAD_END.search(data, max(at, searched))
                if (head_end.end() if head_end else len(data)) - at > MAX_HEAD_BYTES:
                    raise FramingError("response head too large")
                if head_end is None:
                    self._unread = data[at:]
                    if self._unread and self._head_timer is None:
                        loop = asyncio.get_running_loop()
                        self._head_timer = loop.call_later(HEAD_WAIT_S, self._lose, "timeout")
                    return
                self._parse_head(sink, data[at : head_end.end()], more=head_end.end() < len(data))
                at = head_end.end()
        except FramingError:
            self._lose("bad_response")
            return
        if self._sink is None:  # aborted by the sink
            return
        data = data[at:]
        if self._body.complete:
            self._finish(behind=data)
        elif data:
            self._parse_body(sink, at_ns, data, with_head=True)

    def _parse_head(self, sink: ResponseSink, data: bytes, *, more: bool) -> None:
        head = parse_response_head(data)
        if head.status == SWITCHING_PROTOCOLS:
            raise FramingError("a protocol switch that was not requested")
        if head.informational:
            self._num_informational += 1
            if self._num_informational > MAX_INFORMATIONAL:
                raise FramingError("too many informational responses")
        else:
            framing = 0 if self._head_only else head.framing
            self._head, self._body = head, ChunkedBody(lenient=True) if framing == "chunked" else FixedBody(framing)
            self.has_more_data = more or self._body.complete
        self._stop_head_timer()
        sink.response_head(head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _finish(self, behind: bytes) -> None:
        """End the exchange. ``behind``: bytes after the response, which prevent reuse of the connection."""
        sink, self._sink = self._sink, None
        head = self._head
        assert head is not None
        self.malformed = head.odd or self._body.odd or bool(behind.strip(b"\r\n"))
        reusable = head.keep_alive and not head.until_close and not self.malformed and not behind
        if reusable and self.alive:
            self.resume_reading()
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
