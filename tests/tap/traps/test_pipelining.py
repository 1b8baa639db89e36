"""Pipelined requests: responses in order, one request at a time at the upstream."""

import asyncio
from typing import Any

import pytest

from tests.waiting import standstill


def numbered_post(number: int, framing: str) -> bytes:
    head = b"POST /%d HTTP/1.1\r\nHost: t\r\n" % number
    body = b"body %d" % number
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def split_bytes(peer: Any) -> None:
    """Answers each request with its number, after a while in which no other may come."""
    while True:
        head = await peer.head()
        number = int(head.split(b" ")[1][1:])
        end = b"0\r\n\r\n" if b"chunked" in head else b"body %d" % number
        await peer.read_until(end)
        await asyncio.sleep(0.005)
        assert not peer.reader._buffer, "a second request came before the first was answered"
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhere is %d" % number)


@pytest.mark.parametrize("step", [1, 7, 1 << 20], ids=["byte by byte", "by seven bytes", "at once"])
def test_pipelined_responses_are_in_order(rig: Any, step: int) -> None:
    requests = b"".join(numbered_post(number, "length" if number % 2 else "chunked") for number in range(6))
    answers = b"".join(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhere is %d" % number for number in range(6))

    async def scenario() -> None:
        async with rig.tap(split_bytes) as tap:
            client = await tap.connect()
            await client.write(*(requests[at : at + step] for at in range(0, len(requests), step)))
            assert await client.exactly(len(answers)) == answers
            assert len(tap.peers) == 1

    rig.run(scenario())


def test_bytes_after_the_last_request_are_ignored(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        assert (await peer.head()).startswith(b"GET /last ")
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            last = b"GET /last HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
            answer = await tap.ask(last + b"GET /more HTTP/1.1\r\nHost: t\r\n\r\n")
            assert answer.raw.count(b"HTTP/1.1 ") == 1
            assert answer.body == b"ok"

    rig.run(scenario())


def test_malformed_pipelined_request_is_refused_in_order(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await peer.write(b"ok")
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            good = b"GET / HTTP/1.1\r\nHost: t\r\n\r\n"
            answer = await tap.ask(good + b"GET / HTTP/1.1\r\nHost : t\r\n\r\n" + good)
            first, second = answer.raw.split(b"ok", 1)
            assert first.startswith(b"HTTP/1.1 200 ")
            assert second.startswith(b"HTTP/1.1 400 ")
            assert second.count(b"HTTP/1.1 ") == 1

    rig.run(scenario())


def test_pipelined_bytes_are_bounded(rig: Any) -> None:
    """Pipelined requests wait: a few in memory, further bytes on the client's side."""
    item = b"GET /flood HTTP/1.1\r\nHost: t\r\n\r\n"
    many = item * 2000
    go_on = asyncio.Event()

    async def upstream(peer: Any) -> None:
        while True:
            await peer.head()
            await go_on.wait()
            await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            return

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            written = 0

            async def flood() -> None:
                nonlocal written
                while written < 64 << 20:
                    client.writer.write(many)
                    await client.writer.drain()
                    written += len(many)

            flooding = asyncio.create_task(flood())
            assert await standstill(lambda: written) < 24 << 20
            flooding.cancel()
            client.reset()
            go_on.set()

    rig.run(scenario())
