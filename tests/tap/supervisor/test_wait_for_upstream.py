"""The tap before its first upstream is reachable: 503 for clients, readiness reasons, signals."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tap.supervisor import upstreams
from tap.supervisor.service import Signals, bind_listeners
from tap.supervisor.upstreams import reach_upstreams
from wire.url import Origin

POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nbody"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def waiting(lab: Any, port: int, **settings: Any) -> AsyncIterator[Any]:
    """A tap before its upstream; gives the task of waiting and the port of clients."""
    listeners = bind_listeners("--listen", "127.0.0.1", 0)
    config = lab.config(port, **settings)
    signals = Signals()
    task = asyncio.create_task(reach_upstreams(config, signals.reloads, listeners))
    try:
        yield task, listeners[0].getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for sock in listeners:
            sock.close()


async def reported(port: int, request: bytes) -> bytes:
    """Return the complete response; the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    response = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return response


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "RETRY_S", 0.01)


def test_503_and_readiness_reason_until_an_upstream_is_reachable(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        port = free_port()
        async with waiting(lab, port) as (task, clients):
            refused = await reported(clients, POST)
            assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nRetry-After: 5\r\n" in refused
            assert refused.endswith(b'"code": 503}}')
            assert (await reported(clients, b"HEAD / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")).endswith(
                b"\r\n\r\n"
            )
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
            _, reached = await asyncio.wait_for(task, 10)
            assert reached == [Origin("http", "127.0.0.1", port)]
            _, writer = await asyncio.open_connection("127.0.0.1", clients)
            writer.close()  # it waits at the socket for a worker
            server.close()

    asyncio.run(scenario())
    printed = capsys.readouterr().err
    assert "; CLIENTS GET 503 until it can be reached" in printed
    assert printed.count("\n") == 1, "once, however often it was tried"
