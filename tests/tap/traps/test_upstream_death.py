"""An upstream that dies in mid-answer: the client must see an answer cut short, never one that ended.

With a length, the client misses bytes; with chunks, the last one. Where only the connection's end would end the answer,
the tap must end it by a reset.
"""

import asyncio
from typing import Any

import pytest

CLOSING = b"GET /v1/x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("dies", ["closes", "resets"])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        pytest.param(LENGTH, b"", id="length, no byte of it"),
        pytest.param(LENGTH + b"123456789", b"123456789", id="length, one byte short"),
        pytest.param(CHUNKED, b"", id="chunked, no chunk"),
        pytest.param(CHUNKED + b"5\r\nhel", b"5\r\nhel", id="chunked, within a chunk"),
        pytest.param(CHUNKED + b"5\r\nhello", b"5\r\nhello", id="chunked, before a chunk's CRLF"),
        pytest.param(CHUNKED + b"5\r\nhello\r\n1", b"5\r\nhello\r\n", id="chunked, within a size"),
        pytest.param(CHUNKED + b"5\r\nhello\r\n", b"5\r\nhello\r\n", id="chunked, between chunks"),
        pytest.param(CHUNKED + b"5\r\nhello\r\n0\r\n", b"5\r\nhello\r\n0\r\n", id="chunked, before the empty line"),
        pytest.param(CHUNKED + b"0\r\nSum: 1\r\n", b"0\r\nSum: 1\r\n", id="chunked, within the trailers"),
    ],
)
def test_upstream_death_truncates_the_response(rig: Any, answer: bytes, body: bytes, dies: str) -> None:
    seen = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(answer)
        await seen.wait()  # a reset may overtake bytes; that would be the kernel's loss, not the tap's
        if dies == "resets":
            peer.reset()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(CLOSING)
            head = await client.head()
            assert await client.exactly(len(body)) == body
            seen.set()
            assert await client.until_closed() == b""
            assert b"\r\nConnection: close\r\n" in head

    rig.run(scenario())


def test_close_delimited_response_is_reset(rig: Any) -> None:
    seen = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await seen.wait()
        peer.reset()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(CLOSING)
            await client.read_until(b"hello")
            seen.set()
            await client.until_closed()
            assert client.was_reset

    rig.run(scenario())


def test_dechunked_response_is_reset(rig: Any) -> None:
    """HTTP/1.0 has no chunks: the missing last chunk is signalled by a reset."""
    seen = asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(CHUNKED + b"5\r\nhello\r\n")
        await seen.wait()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"GET / HTTP/1.0\r\n\r\n")
            await client.read_until(b"hello")
            seen.set()
            await client.until_closed()
            assert client.was_reset

    rig.run(scenario())


@pytest.mark.parametrize("dies", ["closes", "resets"])
@pytest.mark.parametrize("part", [b"", b"HT", b"HTTP/1.1 200 OK\r\nContent-Len", b"HTTP/1.1 103 Hint\r\n\r\n"])
def test_death_before_the_head_is_not_retried(rig: Any, part: bytes, dies: str) -> None:
    """The request may have run: sent again, it would run twice; answered with a 502, it would be the tap's word."""

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(part)
        if dies == "resets":
            peer.reset()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            request = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
            answer = await tap.ask(request)
            assert answer.raw in {b"", b"HTTP/1.1 103 Hint\r\n\r\n"}
            assert len(tap.peers) == 1
        assert tap.copies.outcomes == [("upstream_abort", "upstream_closed", None)]

    rig.run(scenario())


def test_death_during_upload_is_reported_immediately(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.exactly(1000)
        peer.reset()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 100000000\r\n\r\n", b"x" * 100_000)
            assert await client.until_closed() == b""

    rig.run(scenario())


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 099 Nearly\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\n\r\n",
        b"HTTP/1.1 103 Early\r\n\r\n" * 101 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_invalid_response_is_not_relayed(rig: Any, nonsense: bytes) -> None:
    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(nonsense)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            assert answer.raw.replace(b"HTTP/1.1 103 Early\r\n\r\n", b"") == b""
            await tap.upstream_left()
        assert tap.copies.outcomes == [("error", "bad_response", None)]

    rig.run(scenario())


@pytest.mark.parametrize(
    "framing",
    [
        *(b"zz\r\n", b" 5\r\nhello\r\n", b"5\rhello\r\n", b"5\r\nhelloX", b"-1\r\n", b"\r\n", b"f" * 17 + b"\r\n"),
        b"1;" + b"x" * 2000,
        b"0\r\nX: " + b"x" * 2000,
        b"0\r\n" + b"X: y\r\n" * 4000,
    ],
)
def test_broken_chunks_abort_the_response(rig: Any, framing: bytes) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(CHUNKED, b"1\r\nx\r\n", framing)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(CLOSING)
            assert answer.body.startswith(b"1\r\nx\r\n")
            assert not answer.body.endswith(b"0\r\n\r\n")
            await tap.upstream_left()

    rig.run(scenario())
