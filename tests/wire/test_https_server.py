"""The server half behind TLS: a handshake that fails, or never comes, leaves no connection behind."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import trustme

from wire.dialing import server_context
from wire.requesthead import RequestHead
from wire.server import ClientConnection, Server


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
