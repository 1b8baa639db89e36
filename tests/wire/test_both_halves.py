"""The server and the client against each other: what went in is what comes out, in bounded memory."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import standstill, until
from tests.wire.timedclient import Client, listen
from wire.client.connection import ResponseHead, ServerConnection
from wire.client.pool import ConnectionPool
from wire.errors import LossKind
from wire.server import ClientConnection, RequestHead, Server
from wire.url import Origin

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
NewLoop = Callable[[], asyncio.AbstractEventLoop]


@dataclass
class Scripted:
    """Answers every request with the same pieces, each written on its own; keeps the request's body."""

    head: RequestHead
    connection: ClientConnection
    pieces: list[bytes]
    chunked: bool
    body: bytes = b""

    def request_body(self, raw: bytes, data: bytes) -> None:
        self.body += data

    def request_end(self) -> None:
        length = sum(map(len, self.pieces))
        framing = b"Transfer-Encoding: chunked" if self.chunked else b"Content-Length: %d" % length
        self.connection.write(b"HTTP/1.1 200 OK\r\nX-Body: %d\r\n%b\r\n\r\n" % (len(self.body), framing))
        for piece in self.pieces:
            self.connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
        if self.chunked:
            self.connection.write(b"0\r\n\r\n")
        self.connection.finish(keep_alive=True)
        self.connection.check_integrity()

    def client_gone(self) -> None: ...
    def pause_response(self) -> None: ...
    def resume_response(self) -> None: ...


exchange_plan = st.tuples(
    st.binary(max_size=200), st.lists(st.binary(min_size=1, max_size=5000), max_size=8), st.booleans()
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans=st.lists(exchange_plan, min_size=1, max_size=5))
def test_client_and_server_roundtrip(plans: list[tuple[bytes, list[bytes], bool]]) -> None:
    handlers: list[Scripted] = []
    upcoming = iter(plans)

    def new_handler(head: RequestHead, connection: ClientConnection) -> Scripted:
        _, pieces, chunked = next(upcoming)
        handlers.append(Scripted(head, connection, pieces, chunked))
        return handlers[-1]

    async def main() -> None:
        server = Server(new_handler)
        client = Client(Origin("http", "127.0.0.1", await listen(server)))
        for body, pieces, _ in plans:
            exchange = await client.request("POST", "/x?y=%20z", body=body)
            assert (exchange.outcome, exchange.status, exchange.error_kind) == ("ok", 200, None)
            assert b"".join(data for _, data in exchange.reads) == b"".join(pieces)
            assert handlers[-1].body == body
            assert handlers[-1].head.target == b"/x?y=%20z"
        assert server.num_connections == 1
        await client.close()
        assert await server.drain(1) == 0

    asyncio.run(main())


@dataclass
class Flood:
    """Writes without end while it may."""

    connection: ClientConnection
    paused: bool = False
    gone: bool = False
    written: int = 0

    def request_body(self, raw: bytes, data: bytes) -> None: ...

    def request_end(self) -> None:
        self.connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.pour()

    def pour(self) -> None:
        while not self.paused and not self.gone and self.written < 64_000_000:
            self.connection.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            self.written += 65536

    def client_gone(self) -> None:
        self.gone = True

    def pause_response(self) -> None:
        self.paused = True

    def resume_response(self) -> None:
        self.paused = False
        self.pour()


@dataclass
class SlowSink:
    """Takes a first read and then has its connection stop."""

    connection: ServerConnection
    read: int = 0
    lost: LossKind | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    when_paused: Callable[[], None] = lambda: None

    def response_head(self, head: ResponseHead) -> None: ...

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        assert at_ns <= perf_counter_ns()
        self.read += len(data)
        self.connection.pause_reading()
        self.started.set()

    def response_end(self) -> None: ...

    def response_lost(self, kind: LossKind) -> None:
        self.lost = kind

    def pause_request(self) -> None:
        self.when_paused()

    def resume_request(self) -> None: ...


@pytest.mark.parametrize("new_loop", LOOPS)
def test_client_back_pressure(new_loop: NewLoop) -> None:
    floods: list[Flood] = []

    def new_handler(head: RequestHead, connection: ClientConnection) -> Flood:
        floods.append(Flood(connection))
        return floods[-1]

    async def main() -> None:
        server = Server(new_handler)
        pool = ConnectionPool(Origin("http", "127.0.0.1", await listen(server)))
        connection = await pool.connect()
        sink = SlowSink(connection)
        connection.start(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", sink)
        await sink.started.wait()
        flood = floods[0]
        await standstill(lambda: (sink.read, flood.written))
        assert flood.paused
        assert flood.written < 32_000_000  # kernel buffers and one send buffer, of 64 MB
        connection.abort()
        await until(lambda: flood.gone)  # an abort is seen at once, with a full send buffer too
        assert sink.lost is None  # no calls after an abort
        pool.close()
        await server.drain(1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@dataclass
class Holding(Flood):
    """Takes the request's head and first bytes, then stops reading, and never answers."""

    def request_body(self, raw: bytes, data: bytes) -> None:
        self.written += len(raw)
        self.connection.pause_reading()

    def request_end(self) -> None: ...


@pytest.mark.parametrize("new_loop", LOOPS)
def test_server_back_pressure(new_loop: NewLoop) -> None:
    handlers: list[Holding] = []

    def new_handler(head: RequestHead, connection: ClientConnection) -> Holding:
        handlers.append(Holding(connection))
        return handlers[-1]

    async def main() -> None:
        server = Server(new_handler)
        pool = ConnectionPool(Origin("http", "127.0.0.1", await listen(server)))
        connection = await pool.connect()
        paused = asyncio.Event()
        sink = SlowSink(connection)
        sink.when_paused = paused.set
        connection.start(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 64000000\r\n\r\n", sink)
        for _ in range(64_000_000 // 65536):
            connection.write(b"x" * 65536)
            if paused.is_set():
                break
            await asyncio.sleep(0)
        assert paused.is_set()
        assert handlers[0].written < 1_000_000
        # Bytes on their way keep the close of an aborted connection from arriving: only a drain that cuts can end it.
        connection.abort()
        assert await server.drain(0.1) == 1
        assert handlers[0].gone
        pool.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
