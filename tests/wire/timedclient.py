"""A client that keeps the time of each read, and a server's free port; the sender has its own (loadgen/sending)."""

import asyncio
import socket
from dataclasses import dataclass, field
from time import perf_counter_ns

from wire.client.connection import ResponseHead
from wire.client.pool import ConnectionPool
from wire.errors import LossKind, Outcome
from wire.head import Header, serialise_head
from wire.server import Server
from wire.url import Origin


async def listen(server: Server) -> int:
    """Let a server listen on a free port of this machine; returns the port."""
    sock = socket.create_server(("127.0.0.1", 0))
    await server.listen_on(sock)
    return int(sock.getsockname()[1])


@dataclass(slots=True)
class Exchange:
    """One request and what came back, times in ``perf_counter_ns``: the sink of its connection."""

    sent_ns: int = field(default_factory=perf_counter_ns)
    end_ns: int = 0
    """Last byte of the response read, or the exchange given up."""
    status: int | None = None
    """None: no response line came."""
    headers: list[Header] = field(default_factory=list)
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    """Body reads without chunk framing; reads that held framing alone are left out."""
    outcome: Outcome = "ok"
    error_kind: LossKind | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def response_head(self, head: ResponseHead) -> None:
        if not head.informational:
            self.status, self.headers = head.status, head.headers

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        if data:
            self.reads.append((at_ns, data))

    def response_end(self) -> None:
        self.end_ns = perf_counter_ns()
        self.done.set()

    def response_lost(self, kind: LossKind) -> None:
        self.outcome, self.error_kind = "upstream_abort" if kind == "upstream_closed" else "error", kind
        self.response_end()

    def pause_request(self) -> None: ...

    def resume_request(self) -> None: ...


class Client:
    """Sends requests to one server over keep-alive connections."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._pool = ConnectionPool(origin)

    async def close(self) -> None:
        """Drop every connection."""
        self._pool.close()
        await asyncio.sleep(0)  # lets the transports see it

    async def request(self, method: str, path: str, body: bytes = b"") -> Exchange:
        """Send a request and take in the whole response, within 10 s. A lost one is an outcome, no exception.

        A kept connection that the server had closed meanwhile (``ServerConnection.stale``) costs a second try.
        """
        start_line = b"%b %b HTTP/1.1" % (method.encode("ascii"), self.origin.target(path))
        framing = [(b"Host", self.origin.host_header), (b"Content-Length", b"%d" % len(body))]
        request = serialise_head(start_line, framing) + body
        exchange, connection = Exchange(), self._pool.pop_idle()
        async with asyncio.timeout(10):
            if connection is not None:
                connection.start(request, exchange)
                await exchange.done.wait()
                if not (exchange.error_kind == "upstream_closed" and connection.stale):
                    return exchange
                exchange = Exchange()
            (await self._pool.connect()).start(request, exchange)
            await exchange.done.wait()
        return exchange
