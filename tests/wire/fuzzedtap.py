"""A tap in memory between hostile bytes and a strict parser."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import h11

from tap.ipc.messages import UpstreamEntry
from tap.proxy.capture_buffer import CaptureBudget, CaptureBuffer
from tap.proxy.relay import Relays
from tap.proxy.upstreams import Upstreams
from tests.wire.memorynet import MemoryLoop, MemoryTransport, pump
from tests.wire.strictparser import Request, parse_requests
from wire.server import ClientConnection

MARKER = b"GET /marker HTTP/1.1\r\nHost: t\r\n\r\n"
"""A request that must be answered, or stand on a closed connection, whatever came before it."""


class Forgetful:
    """Stands where the recorder does."""

    def begin(self) -> int:
        """Count nothing."""
        return 1

    def count_unrecorded(self) -> None:
        """Count nothing."""

    def submit(self, side: CaptureBuffer, *_: Any) -> None:
        """Record nothing."""
        side.drop("fuzzed")


@dataclass
class FuzzedTap:
    """Tap with one client connection and its upstream connections."""

    client: MemoryTransport
    relays: Relays
    loop: MemoryLoop

    @classmethod
    def new(cls, relayed: int) -> "FuzzedTap":
        """On the running loop, which must be a MemoryLoop.

        ``relayed``: how many requests it is to believe it had; one relay in some is of the kind that times itself.
        """
        upstreams = Upstreams([UpstreamEntry("http://upstream")])
        relays = Relays(upstreams, cast(Any, Forgetful()), CaptureBudget(1 << 20), 1 << 20)
        relays.relayed = relayed
        client = MemoryTransport(ClientConnection(relays.new_relay, lambda _: None))
        return cls(client, relays, cast(MemoryLoop, asyncio.get_running_loop()))

    @property
    def servers(self) -> list[MemoryTransport]:
        """The upstream's ends of the connections, in the order in which they were made."""
        return self.loop.built

    @property
    def open(self) -> bool:
        """Return whether the client can still send requests."""
        return self.client.ended is None and not self.client.wrote_eof

    async def end(self) -> None:
        """The client leaves; nothing may be left of its requests."""
        cast(ClientConnection, self.client.protocol).check_integrity()
        self.client.peer_closes()
        await pump()
        self.client.abort()
        await pump()
        assert not self.loop.failures, self.loop.failures
        assert self.relays.in_flight == 0
        assert self.relays.budget.used_bytes == 0


@dataclass(frozen=True)
class RequestOutcome:
    """Outcome of a client's bytes."""

    forwarded: list[Request]
    """Whole requests as the strict parser reads them from what the upstream got, in order."""
    answers: bytes
    """Everything that the client got."""
    open: bool
    """Whether the connection would take more."""


def send_requests(pieces: Sequence[bytes]) -> RequestOutcome:
    """Feed a client's bytes, read by read, to a tap whose upstream responds to each complete request."""

    async def main() -> RequestOutcome:
        tap = FuzzedTap.new(relayed=len(pieces) - 1)
        answered: dict[MemoryTransport, int] = {}
        forwarded: list[Request] = []
        for piece in pieces:
            tap.client.feed(piece)
            await _answer_all(tap, answered, forwarded)
        outcome = RequestOutcome(forwarded, bytes(tap.client.written), tap.open)
        for server in tap.servers:
            _compare_with_h11(bytes(server.written))
        await tap.end()
        return outcome

    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        return runner.run(main())


async def _answer_all(tap: FuzzedTap, answered: dict[MemoryTransport, int], forwarded: list[Request]) -> None:
    """Respond to each complete request at the upstream, until no further request arrives."""
    news = True
    while news:
        await pump()
        news = False
        for server in list(tap.servers):
            requests = parse_requests(bytes(server.written), skip_empty_lines=False).requests
            for request in requests[answered.get(server, 0) :]:
                answered[server] = answered.get(server, 0) + 1
                assert answered[server] == len(requests), "two requests at once on one connection"
                forwarded.append(request)
                server.feed(answer_to(request))
                news = True


def answer_to(request: Request) -> bytes:
    """A response that identifies its request."""
    if request.method == b"HEAD":
        return b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"
    echo = b"%b %d" % (request.target[:100], len(request.body))
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(echo), echo)


def _compare_with_h11(data: bytes) -> None:
    """Check that h11 reads as the strict parser does: the same number of requests, targets and bodies."""
    data = data.translate(bytes(range(128)) + b"x" * 128)  # h11 takes no more in targets
    ours = [request.essence for request in parse_requests(data, skip_empty_lines=False).requests]
    theirs = []
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    method = target = body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:  # half a request that the tap refused; its connection is cut
            break
        if isinstance(event, h11.Request):
            method, target, body = event.method, event.target, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            theirs.append((method, target, body))
            connection.send(h11.Response(status_code=204, headers=[]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                break
            connection.start_next_cycle()
        else:
            break
    assert ours == theirs, "the upstream's parser may read other requests than we think it does"


@dataclass(frozen=True)
class ResponseOutcome:
    """Outcome of an upstream's bytes in response to a request."""

    raw: bytes
    """What the client got of them."""
    complete: bool
    """Whether the tap took the response for complete: the client's connection takes another request."""
    next_answer: bytes
    """What the next request on the same connection got; empty where that was closed."""
    was_cut: bool
    """The client's connection was ended without an orderly close, or the response with it."""


def send_response(pieces: Sequence[bytes], *, method: bytes = b"GET", closes: bool = True) -> ResponseOutcome:
    """Feed an upstream's bytes, read by read, as a response; then close and send a second request."""

    async def main() -> ResponseOutcome:
        tap = FuzzedTap.new(relayed=len(pieces) - 1)
        tap.client.feed(method + b" /first HTTP/1.1\r\nHost: t\r\n\r\n")
        await pump()
        [server] = tap.servers
        for piece in pieces:
            server.feed(piece)
            await pump()
        if closes:
            server.peer_closes()
            await pump()
        raw, complete = bytes(tap.client.written), tap.open
        if complete:
            tap.client.feed(MARKER)
            await pump()
            for second in tap.servers:
                if second.ended is None and bytes(second.written).count(b"GET /marker HTTP/1.1\r\n"):
                    second.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nmarker")
            await pump()
        next_answer = bytes(tap.client.written[len(raw) :])
        outcome = ResponseOutcome(raw, complete, next_answer, tap.client.ended == "aborted")
        await tap.end()
        return outcome

    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        return runner.run(main())


def parse_response(raw: bytes, *, method: bytes = b"GET", closed: bool) -> tuple[str, bytes]:
    """h11's opinion of what a client got: ``whole``, ``partial`` or ``malformed``, and the bytes left over."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "t")]))
    connection.send(h11.EndOfMessage())
    try:
        connection.receive_data(raw)
        if closed:
            connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return "partial", b""
            if isinstance(event, h11.EndOfMessage):
                return "whole", bytes(connection.trailing_data[0])
    except h11.RemoteProtocolError as error:
        return ("partial" if "closed connection" in str(error) else "malformed"), b""
