"""A client that leaves: the upstream must stop working for it at once, wherever in the exchange that is.

Each upstream here would go on for ever: a scenario ends only because the tap closes the upstream's connection while the
response is still open.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'10\r\ndata: {"a": 1}\n\n\r\n'

WAYS_TO_LEAVE = [
    pytest.param(lambda client: client.close(), id="closes"),
    pytest.param(lambda client: client.reset(), id="resets"),
    pytest.param(lambda client: client.half_close(), id="half-closes"),
]


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
def test_during_a_stream(rig: Any, leave: Callable[[Any], None]) -> None:
    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(STREAM, EVENT)
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(POST)
            await client.read_until(EVENT)
            leave(client)
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, 200)]

    rig.run(scenario())


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
def test_before_the_response_starts(rig: Any, leave: Callable[[Any], None]) -> None:
    """During a long prefill nothing is written: the disconnect is detected by the client's close only."""
    has_request = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.exactly(2)
        has_request.set()
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(POST)
            await has_request.wait()
            leave(client)
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, None)]

    rig.run(scenario())


@pytest.mark.parametrize("framing", [b"Content-Length: 99", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
def test_during_the_request(rig: Any, leave: Callable[[Any], None], framing: bytes) -> None:
    part = b"5\r\nhello" if b"chunked" in framing else b"hello"
    has_prefix = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        assert await peer.exactly(len(part)) == part
        has_prefix.set()
        assert await peer.until_closed() == b"", "nothing ends the body: half a request is no request"

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n" + framing + b"\r\n\r\n" + part)
            await has_prefix.wait()
            leave(client)
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, None)]

    rig.run(scenario())


def test_while_it_does_not_read(rig: Any) -> None:
    """A client may stall before it leaves; then its close stands behind a full buffer, and must be seen even so."""

    async def upstream(peer: Any) -> None:
        await peer.head()
        peer.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        while not peer.writer.is_closing():
            peer.writer.write(b"x" * 65536)
            await peer.writer.drain()  # ends with ConnectionResetError

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect(receive_buffer=4096)
            client.writer.transport.pause_reading()
            await client.write(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n")
            await asyncio.sleep(0.1)  # the buffers fill
            client.reset()
            await tap.upstream_left()

    rig.run(scenario())


def test_while_the_upstream_does_not_read_the_upload(rig: Any) -> None:
    """The tap has stopped reading from that client, so it gets no event for the close."""
    full = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        peer.writer.transport.pause_reading()
        await full.wait()
        peer.writer.transport.resume_reading()
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
            for _ in range(1000):
                client.writer.write(b"x" * 65536)
                await asyncio.sleep(0)
                if client.writer.transport.get_write_buffer_size() > 1 << 20:
                    break
            client.reset()
            while tap.server.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            full.set()
            await tap.upstream_left()

    rig.run(scenario())


def test_with_pipelined_requests(rig: Any) -> None:
    """Pipelined requests of a client that left are not sent at all."""
    heads = []
    has_first = asyncio.Event()

    async def upstream(peer: Any) -> None:
        heads.append(await peer.head())
        has_first.set()
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"GET /1 HTTP/1.1\r\nHost: t\r\n\r\nGET /2 HTTP/1.1\r\nHost: t\r\n\r\n")
            await has_first.wait()
            client.close()
            await tap.upstream_left()
        assert len(tap.peers) == 1

    rig.run(scenario())
    assert [head.split(b" ")[1] for head in heads] == [b"/1"]


def test_while_the_tap_connects(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = asyncio.Event()

    async def connect(pool: Any) -> None:
        connecting.set()
        await asyncio.Event().wait()

    async def upstream(peer: Any) -> None:
        raise AssertionError("nobody waits for this")

    async def scenario() -> None:
        monkeypatch.setattr("wire.client.pool.ConnectionPool.connect", connect)
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(POST)
            await connecting.wait()
            client.close()
        assert tap.copies.outcomes == [("client_abort", None, None)]

    rig.run(scenario())
