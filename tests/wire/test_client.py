"""The client half against scripted servers: raw bytes on real sockets, cut where it hurts."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.wire.timedclient import Client, Exchange
from wire.url import parse_url

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Two: a\r\nX-Two: b\r\n\r\n"


async def request_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def against(script: Script, ask: Callable[[Client], Awaitable[None]]) -> int:
    """Run one client against a server that follows the script on each connection; returns how many were opened."""
    connections: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await script(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.ensure_future(serve(reader, writer)))

    async def main() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server, asyncio.timeout(20):
            client = Client(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            await ask(client)
            await client.close()
            await asyncio.gather(*connections)

    asyncio.run(main())
    return len(connections)


def body_of(exchange: Exchange) -> bytes:
    return b"".join(data for _, data in exchange.reads)


@pytest.mark.parametrize(
    ("answer", "status", "body", "connections"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", 1),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx", 200, b"x", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", 2),
    ],
)
def test_keep_alive_follows_the_server(answer: bytes, status: int, body: bytes, connections: int) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_head(reader)
            writer.write(answer)

    async def ask(client: Client) -> None:
        for _ in range(2):
            exchange = await client.request("GET", "/")
            assert (exchange.outcome, exchange.status, body_of(exchange)) == ("ok", status, body)

    assert against(script, ask) == connections


@pytest.mark.parametrize(
    ("answer", "outcome", "kind"),
    [
        (CHUNKED + b"4\r\nwiki\r\n", "upstream_abort", "upstream_closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nwiki", "upstream_abort", "upstream_closed"),
        (b"", "upstream_abort", "upstream_closed"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "error", "bad_response"),
        (CHUNKED + b"zz\r\nwiki\r\n", "error", "bad_response"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "error", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "error", "bad_response"),
    ],
)
def test_truncated_response_is_never_complete(answer: bytes, outcome: str, kind: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(answer)

    async def ask(client: Client) -> None:
        exchange = await client.request("GET", "/")
        assert (exchange.outcome, exchange.error_kind) == (outcome, kind)

    against(script, ask)
