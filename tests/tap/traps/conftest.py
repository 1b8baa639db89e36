"""What the traps share: a tap in this process between a client and an upstream that both say raw bytes.

There is no recorder process behind it: copies of finished exchanges are kept as the relay handed them over. Every trap
is tried on both event loops.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from tap.ipc.messages import CapturedExchange, UpstreamEntry
from tap.proxy.capture_buffer import CaptureBudget, CaptureBuffer
from tap.proxy.relay import Relays
from tap.proxy.upstreams import Upstreams
from tracefile.records.schema import Status
from wire.server import Server
from wire.url import Origin

PATIENCE_S = 20.0
"""How long anything may take on a machine that is busy with other things."""


async def wait_until_idle() -> None:
    """Let everybody on this loop read what was just written."""
    for _ in range(4):
        await asyncio.sleep(0)


def tcp_socket() -> socket.socket:
    """Socket that reports TCP: asyncio sets TCP_NODELAY only on TCP sockets."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)


def listening(send_buffer: int | None) -> socket.socket:
    """A listening socket, whose connections' kernel buffers take ``send_buffer`` bytes ahead of their reader."""
    sock = tcp_socket()
    sock.bind(("127.0.0.1", 0))
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.listen(256)
    return sock


class Peer:
    """One end of a connection, the client's or the upstream's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = 0) -> None:
        self.reader, self.writer = reader, writer
        self.number = number
        """Number of the upstream connection, from 0."""
        self.was_reset = False

    async def read_until(self, end: bytes) -> bytes:
        return await self.reader.readuntil(end)

    async def head(self) -> bytes:
        return await self.read_until(b"\r\n\r\n")

    async def exactly(self, count: int) -> bytes:
        return await self.reader.readexactly(count)

    async def until_closed(self) -> bytes:
        """Return all bytes up to the end of the connection; ``was_reset``: whether it ended by RST."""
        pieces = []
        try:
            while piece := await self.reader.read(1 << 16):
                pieces.append(piece)
        except ConnectionError:
            self.was_reset = True
        return b"".join(pieces)

    async def write(self, *pieces: bytes) -> None:
        """Write pieces, each to be a read of its own on the other side."""
        for piece in pieces:
            self.writer.write(piece)
            await wait_until_idle()
        await self.writer.drain()

    async def over(self) -> None:
        """Wait until this connection of the upstream's has ended and its conversation with it."""
        while not self.writer.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def close(self) -> None:
        self.writer.close()

    def half_close(self) -> None:
        self.writer.write_eof()

    def close_at_once(self) -> None:
        """Close within this call: a transport's own close waits for the loop's next turn."""
        with socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Leave without a goodbye, as a killed process with unread bytes does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass(frozen=True)
class Answer:
    """What a client read up to the end of its connection."""

    raw: bytes
    was_reset: bool

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    @property
    def body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])


@dataclass
class RecordedCaptures:
    """Stands where the recorder does, and keeps what it would get."""

    exchanges: list[CapturedExchange] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    unrecorded: int = 0

    def begin(self) -> int:
        return 1

    def count_unrecorded(self) -> None:
        self.unrecorded += 1

    def submit(self, side: CaptureBuffer, end_ns: int, outcome: Status, error_kind: str | None) -> None:
        if side.dropped is not None:
            self.dropped[side.dropped] += 1
        else:
            self.exchanges.append(side.finish(end_ns, outcome, error_kind))

    @property
    def outcomes(self) -> list[tuple[str, str | None, int | None]]:
        """Outcome, error and HTTP status of each exchange, in the order of their ends."""
        return [(copy.outcome, copy.error_kind, copy.http_status) for copy in self.exchanges]


@dataclass
class TrapTap:
    """A tap on its port, and what of it a trap looks at."""

    port: int
    server: Server
    copies: RecordedCaptures
    budget: CaptureBudget
    peers: list[Peer]
    """The upstream's connections so far, open or not."""
    clients: list[Peer] = field(default_factory=list)

    async def connect(self, receive_buffer: int | None = None) -> Peer:
        sock = tcp_socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        self.clients.append(Peer(*await asyncio.open_connection(sock=sock, limit=1 << 26)))
        return self.clients[-1]

    async def upstream_left(self) -> None:
        """Wait until the tap has left the upstream alone, of its own accord: all connections to it have ended."""
        for peer in self.peers:
            await peer.over()

    async def ask(self, *request: bytes) -> Answer:
        """Send a request in these pieces on a connection of its own and read until the tap closes it."""
        client = await self.connect()
        await client.write(*request)
        raw = await client.until_closed()
        client.close()
        return Answer(raw, client.was_reset)


Conversation = Callable[[Peer], Awaitable[None]]


class RawUpstream:
    """Runs a coroutine on each accepted connection; closes the connection when it returns."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.peers: list[Peer] = []
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def serving(self, send_buffer: int | None) -> AsyncIterator[int]:
        listener = listening(send_buffer)
        server = await asyncio.start_server(self._accept, sock=listener, limit=1 << 26)
        try:
            yield listener.getsockname()[1]
        finally:
            server.close()
            # What a conversation asserts counts; that the tap closed on it does not.
            done = await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), PATIENCE_S)
            await wait_until_idle()
        for outcome in done:
            if isinstance(outcome, BaseException) and not isinstance(outcome, OSError | EOFError):
                raise outcome

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(Peer(reader, writer, len(self.peers)))
        self._tasks.append(asyncio.ensure_future(self._converse(self.peers[-1])))

    async def _converse(self, peer: Peer) -> None:
        try:
            await self.conversation(peer)
        finally:
            peer.close()


@dataclass
class Rig:
    """Sets a tap up in front of an upstream and runs a scenario with it."""

    new_loop: Callable[[], asyncio.AbstractEventLoop]

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(asyncio.wait_for(scenario, 3 * PATIENCE_S))

    @contextlib.asynccontextmanager
    async def tap(
        self,
        conversation: Conversation,
        *,
        base_path: str = "",
        queue_bytes: int = 64 << 20,
        send_buffer: int | None = None,
        tap_send_buffer: int | None = None,
        body_stall_s: float = PATIENCE_S,
        upstream_port: int | None = None,
    ) -> AsyncIterator[TrapTap]:
        """A tap for the length of the block.

        ``send_buffer``, ``tap_send_buffer``: how much the kernel takes from the upstream, and from the tap, ahead of
        whoever reads it. ``upstream_port``: another port than the conversation's.
        """
        upstream = RawUpstream(conversation)
        async with upstream.serving(send_buffer) as bound_port:
            origin = Origin("http", "127.0.0.1", upstream_port or bound_port, base_path)
            copies, budget, upstreams = (
                RecordedCaptures(),
                CaptureBudget(queue_bytes),
                Upstreams([UpstreamEntry(str(origin))]),
            )
            relays = Relays(upstreams, copies, budget, 1 << 20)  # type: ignore[arg-type]
            server = Server(relays.new_relay, body_stall_s=body_stall_s)
            listener = listening(tap_send_buffer)
            await server.listen_on(listener)
            tap = TrapTap(listener.getsockname()[1], server, copies, budget, upstream.peers)
            try:
                yield tap
            finally:
                for client in tap.clients:
                    client.close()
                await server.drain(PATIENCE_S)
                upstreams.close()
                await wait_until_idle()
        assert budget.used_bytes == 0, "a copy was neither handed over nor released"
        assert relays.in_flight == 0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)
