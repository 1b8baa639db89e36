"""When a request lost on a kept connection may be sent again: only if nothing can have come of it."""

import asyncio
import contextlib

import pytest

from tests.wire.timedclient import Client, Exchange
from wire.client import connection
from wire.url import parse_url

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """Responds to the first request of a connection, and handles the second by ``second``."""

    def __init__(self, second: bytes, delay_s: float = 0.0) -> None:
        self.second, self.delay_s = second, delay_s
        self.requests = 0
        self.tasks: list[asyncio.Task[None]] = []

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            await asyncio.sleep(self.delay_s)
            writer.write(self.second)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def ask_twice(peer: Peer) -> Exchange:
    """Send two requests in sequence; return the second exchange."""
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with await asyncio.start_server(peer.connected, "127.0.0.1", 0) as server, asyncio.timeout(10):
            client = Client(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            exchanges.extend([await client.request("POST", "/", body=b"{}") for _ in range(2)])
            await client.close()
            await asyncio.gather(*peer.tasks)

    asyncio.run(main())
    return exchanges[1]


def test_stale_connection_is_retried() -> None:
    exchange = ask_twice(Peer(b""))
    assert (exchange.outcome, exchange.status) == ("ok", 200)


@pytest.mark.parametrize("beginning", [b"H", b"HTTP/1.1 20", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_started_response_is_never_retried(beginning: bytes) -> None:
    peer = Peer(beginning)
    exchange = ask_twice(peer)
    assert (exchange.outcome, exchange.error_kind, exchange.status) == ("upstream_abort", "upstream_closed", None)
    assert peer.requests == 2


def test_request_in_progress_is_not_repeated_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    # It had the request for longer than a close can take to cross it: it may have run it.
    monkeypatch.setattr(connection, "STALE_WITHIN_NS", 20_000_000)
    peer = Peer(b"", delay_s=0.1)
    assert ask_twice(peer).outcome == "upstream_abort"
    assert peer.requests == 2


def test_body_of_tiny_chunks_continues_after_yielding() -> None:
    """The server keeps the connection open: nothing but its own turns moves the client on."""
    body = b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        await reader.read()  # until the client closes
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def main() -> Exchange:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(10):
            client = Client(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            exchange = await client.request("POST", "/", body=b"{}")
            await client.close()
            await ended.wait()
            return exchange

    exchange = asyncio.run(main())
    assert exchange.outcome == "ok"
    assert sum(len(data) for _, data in exchange.reads) == 20_000
