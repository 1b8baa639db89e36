"""The end of a tap: what is in flight ends as it would have, nothing new begins, and what does not end is cut."""

import asyncio
from typing import Any

import pytest

GET = b"GET / HTTP/1.1\r\nHost: t\r\n\r\n"


def test_drain_finishes_responses_and_closes_connections(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.server.LINGER_S", 0.05)
    go_on = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        if peer.number == 0:
            await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await go_on.wait()
        if peer.number == 0:
            await peer.write(b"1\r\nb\r\n0\r\n\r\n")
        else:
            await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nc")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            started, waiting, idle = [await tap.connect() for _ in range(3)]
            await started.write(GET)
            await started.read_until(b"a\r\n")
            await waiting.write(GET + GET)  # the second request is not started
            while len(tap.peers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(tap.server.drain(20))
            assert await idle.until_closed() == b""
            go_on.set()
            assert await started.until_closed() == b"1\r\nb\r\n0\r\n\r\n"
            answer = await waiting.until_closed()
            assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nc"
            assert await draining == 0, "nothing was cut"

    rig.run(scenario())


def test_drain_accepts_no_connections(rig: Any) -> None:
    async def upstream(peer: Any) -> None: ...

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            assert await tap.server.drain(20) == 0
            try:
                late = await tap.connect()
            except ConnectionRefusedError:
                return
            assert await late.until_closed() == b""

    rig.run(scenario())


def test_drain_timeout_aborts_responses(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            await client.read_until(b"a\r\n")
            assert await tap.server.drain(0.05) == 1
            assert await client.until_closed() == b""
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, 200)]

    rig.run(scenario())
