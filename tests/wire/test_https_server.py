"""The server half behind TLS: a handshake that fails, or never comes, leaves no connection behind."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from wire.requesthead import RequestHead
from wire.server import READ_BYTES, ClientConnection, Server
from wire.tls import server_context


def respond(head: RequestHead, client: ClientConnection) -> "Ok":
    return Ok(client)


class Ok:
    def __init__(self, client: ClientConnection) -> None:
        self._client = client

    def request_body(self, raw: bytes, data: bytes) -> None: ...

    def request_end(self) -> None:
        self._client.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        self._client.finish(keep_alive=True)

    def client_gone(self) -> None: ...

    def pause_response(self) -> None: ...

    def resume_response(self) -> None: ...


def test_a_failed_handshake_leaves_no_connection(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        server = Server(respond)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
            await server.listen_on(sock.dup(), server_context(str(tmp_path / "own.pem"), None))
        silent = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
        reader, secure = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
        secure.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert server.num_connections == 1
        assert await asyncio.wait_for(server.drain(60), 10) == 0, "an idle connection and a silent one hold nothing up"
        for writing in (silent[1], writer, secure):
            writing.close()
        await asyncio.sleep(0.01)

    asyncio.run(scenario())


class Pieces(Ok):
    def __init__(self, client: ClientConnection, read: list[bytes]) -> None:
        super().__init__(client)
        self._read = read

    def request_body(self, raw: bytes, data: bytes) -> None:
        self._read.append(data)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("secure", [False, True])
def test_a_large_body_comes_whole_and_in_pieces(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], secure: bool
) -> None:
    """A turn of TLS reads what one buffer holds; the rest waits decrypted, and no socket tells of it."""
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    sent, read = bytes(islice(cycle(range(251)), 5 * READ_BYTES + 7)), list[bytes]()

    async def scenario() -> None:
        server = Server(lambda _, client: Pieces(client, read))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
            await server.listen_on(sock.dup(), server_context(str(tmp_path / "own.pem"), None) if secure else None)
        options: dict[str, Any] = {"ssl": trusting, "server_hostname": "localhost"} if secure else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(sent), sent))
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), 10)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        await server.drain(5)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
    assert b"".join(read) == 2 * sent
    assert max(map(len, read)) <= READ_BYTES
