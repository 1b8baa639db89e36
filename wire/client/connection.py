"""The client half of HTTP/1.1: a connection to a server, one exchange at a time."""

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
"""Most 1xx responses before the final one: enough for a word of progress now and then."""
HEAD_WAIT_S = 75.0
"""Time for the rest of a head that has begun; before its first byte a server may work as long as its client waits."""
LARGE_BODY_BYTES = 32 * 1024
"""From this size on, the loop writes a head and its body in one system call faster than they are joined here."""
STALE_WITHIN_NS = 1_000_000_000
"""A server that closed an idle connection shows within a round trip; one that dies later had begun to work on it."""


class ResponseSink(Protocol):
    """Receiver of one exchange, called from within the read: no method may block."""

    def response_head(self, head: ResponseHead) -> None:
        """A head is complete. Informational ones come first, if any."""

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Take one read: its bytes to pass on, and without chunk framing."""

    def response_end(self) -> None:
        """The response is complete. The connection is already free for others."""

    def response_lost(self, kind: LossKind) -> None:
        """The exchange ended before its response did. The connection is closed."""

    def pause_request(self) -> None:
        """The server reads slower than the body is written."""

    def resume_request(self) -> None:
        """The server has caught up."""


class ServerConnection(Connection, asyncio.Protocol):
    """Connection to a server: ``start`` an exchange, and the sink hears of all. A relay writes on the raw bytes."""

    def __init__(
        self,
        on_idle: Callable[["ServerConnection"], None],
        on_closed: Callable[["ServerConnection"], None],
        turns: Turns | None = None,
    ) -> None:
        super().__init__(turns)
        self.waited = False
        """Whether it lay idle before its exchange: the server may have closed it meanwhile."""
        self._started_ns = self._lost_ns = 0
        self._on_idle, self._on_closed = on_idle, on_closed
        self._sink: ResponseSink | None = None
        self._head_only = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._unread = b""
        """Beginning of a head, or what waits for the connection's next turn."""
        self._head: ResponseHead | None = None
        self._body: FixedBody | ChunkedBody = FixedBody(0)
        self._num_informational = 0
        self._answered = False
        self.more_to_come = False
        """Of a final head: the same read holds more of the response, or its end; the sink hears of it at once."""
        self.malformed = False
        """Whether the response in progress is not framed as it should be, although its end is certain."""

    @property
    def stale(self) -> bool:
        """Return whether the server closed the connection idle: no byte came, within a second, and may be repeated."""
        return self.waited and not self._answered and 0 < self._lost_ns - self._started_ns < STALE_WITHIN_NS

    @property
    def usable(self) -> bool:
        return self._sink is None and self.alive

    def start(self, request: bytes, sink: ResponseSink, *, body: Sequence[bytes] = (), head_only: bool = False) -> None:
        """Write a request's head (and body, as far as it is known) and tell ``sink`` of the response."""
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
        """Drop the connection at once and tell the sink nothing more."""
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    # What the event loop calls.

    def data_received(self, data: bytes) -> None:
        at_ns = perf_counter_ns()
        sink = self._sink
        if sink is None:  # a server that speaks without being asked cannot be trusted with a request
            self.abort()
        elif self._head is None:
            self._take_heads(sink, at_ns, data)
        elif self._on_break:
            self._unread += data
        elif (piece := self._body.one_chunk(data)) is not None:
            sink.response_body(at_ns, data, piece)
        else:
            self._take_body(sink, at_ns, data, with_head=False)

    def eof_received(self) -> None:
        """The server has no more to say; ``connection_lost`` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        while self._on_break and self._sink is not None:  # what had come counts
            self._end_break()
        self._stop_head_timer()
        self.transport = None
        if self._sink is not None:
            if self._head is not None and self._head.until_close and exc is None:
                sink, self._sink = self._sink, None
                sink.response_end()
            else:
                # TLS 1.3 refuses a client's certificate only after the client's handshake has ended.
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

    # One exchange, step by step.

    def _take_body(self, sink: ResponseSink, at_ns: int, data: bytes, *, with_head: bool) -> None:
        """Read on: what the sink hears of does not depend on where the reads were cut."""
        body = self._body
        try:
            raw, piece, taken = body.feed(data)
        except FramingError:
            self._lose("bad_response")
            return
        if raw or with_head:
            sink.response_body(at_ns, raw, piece)
        if body.complete:
            self._finish(behind=data[taken:])
        elif body.dense:
            body.dense = False
            self._unread = data[taken:]
            self._take_break()

    def _go_on(self) -> None:
        unread, self._unread = self._unread, b""
        if self._sink is not None and unread:
            self._take_body(self._sink, perf_counter_ns(), unread, with_head=False)

    def _take_heads(self, sink: ResponseSink, at_ns: int, data: bytes) -> None:
        """Consume heads up to the final one, and then what is there of its body."""
        self._answered = True
        searched = max(0, len(self._unread) - 2)
        data, self._unread = self._unread + data, b""
        at = 0
        try:
            while self._head is None and self._sink is not None:
                if (empty := EMPTY_LINES.match(data, at)) is not None:  # too many of them, before the response
                    at = empty.end()
                found = HEAD_END.search(data, max(at, searched))
                if (found.end() if found else len(data)) - at > MAX_HEAD_BYTES:
                    raise FramingError("response head too large")
                if found is None:
                    self._unread = data[at:]
                    if self._unread and self._head_timer is None:
                        loop = asyncio.get_running_loop()
                        self._head_timer = loop.call_later(HEAD_WAIT_S, self._lose, "timeout")
                    return
                self._take_head(sink, data[at : found.end()], more=found.end() < len(data))
                at = found.end()
        except FramingError:
            self._lose("bad_response")
            return
        if self._sink is None:  # aborted from within
            return
        data = data[at:]
        if self._body.complete:
            self._finish(behind=data)
        elif data:
            self._take_body(sink, at_ns, data, with_head=True)

    def _take_head(self, sink: ResponseSink, data: bytes, *, more: bool) -> None:
        head = parse_response_head(data)
        if head.status == SWITCHING_PROTOCOLS:
            raise FramingError("protocol switch that nobody asked for")
        if head.informational:
            self._num_informational += 1
            if self._num_informational > MAX_INFORMATIONAL:
                raise FramingError("too many informational responses")
        else:
            framing = 0 if self._head_only else head.framing
            self._head, self._body = head, ChunkedBody(lenient=True) if framing == "chunked" else FixedBody(framing)
            self.more_to_come = more or self._body.complete
        self._stop_head_timer()
        sink.response_head(head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _finish(self, behind: bytes) -> None:
        """End the exchange. ``behind``: bytes behind the response, after which the connection is closed."""
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
