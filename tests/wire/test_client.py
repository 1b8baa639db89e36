"""The client half against scripted servers: raw bytes on real sockets, cut where it hurts."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from tests.wire.timedclient import Client, Exchange
from wire.url import parse_url

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Two: a\r\nX-Two: b\r\n\r\n"
BODY = b"4\r\nwiki\r\n6;e=1\r\npedia \r\n0\r\n\r\n"


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
    return b"".join(read.data for read in exchange.reads)


def test_a_response_cut_at_every_byte_is_the_same_response() -> None:
    whole = CHUNKED + BODY
    cuts = iter(range(1, len(whole)))

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_head(reader)
            cut = next(cuts)
            writer.write(whole[:cut])
            await writer.drain()
            await asyncio.sleep(0.001)
            writer.write(whole[cut:])

    async def ask(client: Client) -> None:
        for _ in range(1, len(whole)):
            exchange = await client.request("GET", "/")
            assert (exchange.outcome, exchange.status, body_of(exchange)) == ("ok", 200, b"wikipedia ")
            assert [value for name, value in exchange.headers if name == b"X-Two"] == [b"a", b"b"]
            times = [exchange.sent_ns, *(read.at_ns for read in exchange.reads), exchange.end_ns]
            assert times == sorted(times)

    assert against(script, ask) == 1  # the connection was kept throughout


def test_informational_responses_come_before_the_answer() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()

    async def ask(client: Client) -> None:
        exchange = await client.request("GET", "/")
        assert (exchange.status, body_of(exchange)) == (200, b"ok")

    against(script, ask)


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
def test_a_connection_is_kept_only_where_the_server_keeps_it(
    answer: bytes, status: int, body: bytes, connections: int
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_head(reader)
            writer.write(answer)

    async def ask(client: Client) -> None:
        for _ in range(2):
            exchange = await client.request("GET", "/")
            assert (exchange.outcome, exchange.status, body_of(exchange)) == ("ok", status, body)

    assert against(script, ask) == connections


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async def ask(client: Client) -> None:
        exchange = await client.request("GET", "/")
        assert (exchange.outcome, body_of(exchange)) == ("ok", b"all of it")

    against(script, ask)


def test_a_head_request_has_no_body_whatever_its_length_says() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        await reader.read()

    async def ask(client: Client) -> None:
        exchange = await client.request("HEAD", "/", timeout_s=5)
        assert (exchange.outcome, exchange.status, exchange.reads) == ("ok", 200, [])

    against(script, ask)


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
def test_a_response_that_breaks_off_is_never_a_whole_one(answer: bytes, outcome: str, kind: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(answer)

    async def ask(client: Client) -> None:
        exchange = await client.request("GET", "/")
        assert (exchange.outcome, exchange.error_kind) == (outcome, kind)

    against(script, ask)


def test_bytes_behind_the_end_cost_the_connection_and_not_the_response() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(CHUNKED + BODY + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    async def ask(client: Client) -> None:
        for _ in range(2):
            exchange = await client.request("GET", "/")
            assert (exchange.outcome, exchange.status, body_of(exchange)) == ("ok", 200, b"wikipedia ")

    assert against(script, ask) == 2


def test_a_stale_connection_costs_a_second_try_and_a_fresh_failure_none() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Each connection answers once and drops dead at the second request.
        await request_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await request_head(reader)

    async def ask(client: Client) -> None:
        for number in range(3):
            exchange = await client.request("GET", "/")
            assert (exchange.outcome, exchange.status, body_of(exchange)) == ("ok", 200, b"ok"), number

    assert against(script, ask) == 3


def test_cancelling_closes_the_connection_and_keeps_what_had_come() -> None:
    started, closed = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        writer.write(CHUNKED + b"4\r\nwiki\r\n")
        started.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        closed.set()

    async def ask(client: Client) -> None:
        exchange = Exchange()
        task = asyncio.ensure_future(client.request("GET", "/", into=exchange))
        await started.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()
        assert (exchange.outcome, exchange.status, body_of(exchange)) == ("client_abort", 200, b"wiki")

    against(script, ask)


def test_a_timeout_is_an_outcome() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_head(reader)
        await reader.read()

    async def ask(client: Client) -> None:
        exchange = await client.request("GET", "/", timeout_s=0.05)
        assert (exchange.outcome, exchange.error_kind, exchange.status) == ("timeout", "timeout", None)

    against(script, ask)


def test_a_server_that_is_not_there_is_an_outcome() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def main() -> None:
        exchange = await Client(parse_url(f"http://127.0.0.1:{port}")).request("GET", "/")
        assert (exchange.outcome, exchange.error_kind) == ("error", "connect_refused")

    asyncio.run(main())


def test_the_request_is_written_as_given() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_head(reader) + await reader.readexactly(2))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.read()

    async def ask(client: Client) -> None:
        await client.request("POST", "/v1/x?y=1", [(b"X-Id", b"7")], b"{}")

    against(script, ask)
    start_line, host, length, own = seen[0].split(b"\r\n\r\n")[0].split(b"\r\n")
    assert start_line == b"POST /v1/x?y=1 HTTP/1.1"
    assert host.startswith(b"Host: 127.0.0.1:")
    assert (length, own) == (b"Content-Length: 2", b"X-Id: 7")


def test_tls_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await request_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context) as server:
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            stranger = await Client(parse_url(url)).request("GET", "/")
            assert (stranger.outcome, stranger.error_kind) == ("error", "tls_failed")
            authority.cert_pem.write_to_path(tmp_path / "authority.pem")
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
            client = Client(parse_url(url))
            friend = await client.request("GET", "/")
            assert (friend.outcome, body_of(friend)) == ("ok", b"ok")
            await client.close()
            await asyncio.sleep(0.05)

    asyncio.run(main())
