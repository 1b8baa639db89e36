"""A client that keeps the time of each read, for benches and tests; the sender has its own (loadgen/sending)."""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter_ns

from wire.client.connection import ResponseHead, ServerConnection
from wire.client.pool import ConnectError, ConnectionPool
from wire.completion import BodyRead
from wire.errors import LossKind, Outcome
from wire.head import Header, Headers, serialise_head
from wire.url import Origin


@dataclass(slots=True)
class Exchange:
    """One request and what came back, times in ``perf_counter_ns``."""

    sent_ns: int = 0
    """Just before the request's first byte was written."""
    end_ns: int = 0
    """Last byte of the response read, or the exchange given up."""
    status: int | None = None
    """None: no response line came."""
    headers: list[Header] = field(default_factory=list)
    reads: list[BodyRead] = field(default_factory=list)
    """Body reads without chunk framing; reads that held framing alone are left out."""
    outcome: Outcome = "ok"
    """ok: a whole response came, whatever its status. error: no connection, or not HTTP."""
    error_kind: LossKind | None = None
    reused: bool = False
    """Whether it went over a connection that an earlier exchange had used."""

    @property
    def first_byte_ns(self) -> int | None:
        """When the first body byte came. None: none did."""
        return self.reads[0].at_ns if self.reads else None


class Client:
    """Sends requests to one server over kept connections.

    Cancelling the task that awaits a request closes its connection at once, as a client that went away would.
    """

    def __init__(self, origin: Origin, *, connect_timeout_s: float = 10.0, pool_size: int = 1024) -> None:
        self.origin = origin
        self._pool = ConnectionPool(origin, connect_timeout_s=connect_timeout_s, max_idle=pool_size)

    async def warm(self, count: int) -> None:
        """Open ``count`` connections ahead of need. Raises ConnectError."""
        await self._pool.warm(count)

    async def close(self) -> None:
        """Drop every connection."""
        self._pool.close()
        await asyncio.sleep(0)  # lets the transports see it

    async def request(
        self,
        method: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        into: Exchange | None = None,
    ) -> Exchange:
        """Send a request and take in the whole response. Failures are outcomes, never exceptions.

        ``timeout_s`` counts from the call to the last byte. ``into`` is filled as things happen and is what is
        returned: whoever cancels the call finds there what had come by then, with outcome ``client_abort``. A kept
        connection that the server had closed meanwhile (``ServerConnection.stale``) costs a second try on a new one;
        its time counts, the first try being the send.
        """
        exchange = into or Exchange()
        start_line = b"%b %b HTTP/1.1" % (method.encode("ascii"), self.origin.target(path))
        framing = [(b"Host", self.origin.host_header)]
        if body or method in {"POST", "PUT", "PATCH"}:
            framing.append((b"Content-Length", b"%d" % len(body)))
        request = serialise_head(start_line, [*framing, *headers]) + body
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        head_only = method == "HEAD"
        stale = await self._exchange(request, exchange, deadline, fresh=False, head_only=head_only)
        if stale:
            exchange.outcome, exchange.error_kind = "ok", None
            await self._exchange(request, exchange, deadline, fresh=True, head_only=head_only)
        return exchange

    async def _exchange(
        self, request: bytes, exchange: Exchange, deadline: float | None, *, fresh: bool, head_only: bool
    ) -> bool:
        """One try, its outcome in ``exchange``; True if it met a stale connection."""
        collector = _Collector(exchange)
        try:
            async with asyncio.timeout_at(deadline):
                connection = (None if fresh else self._pool.take_idle()) or await self._pool.connect()
                collector.begin(connection, request, head_only=head_only)
                await collector.done
            return exchange.error_kind == "upstream_closed" and connection.stale
        except TimeoutError:
            collector.give_up("timeout", "timeout")
        except ConnectError as error:
            collector.give_up("timeout" if error.kind == "connect_timeout" else "error", error.kind)
        except asyncio.CancelledError:
            collector.give_up("client_abort", None)
            raise
        return False


class _Collector:
    """The sink of one request: keeps every read with its time."""

    __slots__ = ("_connection", "done", "exchange")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection: ServerConnection | None = None

    def begin(self, connection: ServerConnection, request: bytes, *, head_only: bool) -> None:
        self._connection = connection
        self.exchange.reused = connection.exchanges > 0
        self.exchange.sent_ns = self.exchange.sent_ns or perf_counter_ns()
        connection.start(request, self, head_only=head_only)

    def give_up(self, outcome: Outcome, kind: LossKind | None) -> None:
        self.exchange.end_ns = perf_counter_ns()
        self.exchange.sent_ns = self.exchange.sent_ns or self.exchange.end_ns
        self.exchange.outcome, self.exchange.error_kind = outcome, kind
        if self._connection is not None:
            self._connection.abort()

    def response_head(self, head: ResponseHead) -> None:
        if not head.informational:
            self.exchange.status = head.status
            self.exchange.headers = head.headers

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        del raw
        if data:
            self.exchange.reads.append(BodyRead(at_ns, data))

    def response_end(self) -> None:
        self._end()

    def response_lost(self, kind: LossKind) -> None:
        self.exchange.outcome = "upstream_abort" if kind == "upstream_closed" else "error"
        self.exchange.error_kind = kind
        self._end()

    def pause_request(self) -> None:
        """The whole request is in the transport's buffer already."""

    def resume_request(self) -> None:
        """See ``pause_request``."""

    def _end(self) -> None:
        self.exchange.end_ns = perf_counter_ns()
        if not self.done.done():
            self.done.set_result(None)
