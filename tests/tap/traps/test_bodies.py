"""Ends of bodies: empty, with trailers, encoded, HTTP/1.0; and the next response on the connection."""

import gzip
from typing import Any

import pytest

from tap.supervisor.account import Account

NEXT = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnext"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        pytest.param(b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", id="HEAD with a length"),
        pytest.param(b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", id="HEAD, chunked"),
        pytest.param(b"HEAD", b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", id="HEAD of nothing"),
        pytest.param(b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
        pytest.param(b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\nETag: x\r\n\r\n", id="304"),
        pytest.param(b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", id="length 0"),
        pytest.param(b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="no chunk"),
    ],
)
def test_response_without_body_keeps_connections(rig: Any, method: bytes, answer: bytes) -> None:
    async def upstream(peer: Any) -> None:
        assert (await peer.head()).startswith(method + b" /first ")
        await peer.write(answer)
        assert (await peer.head()).startswith(b"GET /next ")
        await peer.write(NEXT)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(method + b" /first HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await client.exactly(len(answer)) == answer
            await client.write(b"GET /next HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await client.exactly(len(NEXT)) == NEXT
            assert len(tap.peers) == 1

    rig.run(scenario())


def test_head_request_without_length(rig: Any) -> None:
    """For a GET, the body would end with the connection. The client's connection stays usable."""
    answer = b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n"

    async def upstream(peer: Any) -> None:
        await peer.write(answer if (await peer.head()).startswith(b"HEAD") else NEXT)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"HEAD / HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await client.exactly(len(answer)) == answer
            await client.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await client.exactly(len(NEXT)) == NEXT

    rig.run(scenario())


def test_unrecorded_posts_are_counted(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        while True:
            await peer.head()
            await peer.write(NEXT)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for path in (b"POST /tokenize", b"POST /predict", b"GET /predict", b"POST /completion"):
                await client.write(path + b" HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n")
                assert await client.exactly(len(NEXT)) == NEXT
            assert (tap.copies.unrecorded, len(tap.copies.exchanges)) == (2, 1)
        line = Account(unrecorded=2).line()
        assert line.startswith("0 of 0 requests recorded (2 POSTs to paths other than /v1/… were only relayed);")

    rig.run(scenario())


def test_unexpected_body_is_not_parsed_as_the_next_response(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for number in range(1, 4):
                await client.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
                assert await client.head() == b"HTTP/1.1 204 No Content\r\n\r\n"
                assert len(tap.peers) == number
            client.half_close()
            assert await client.until_closed() == b""

    rig.run(scenario())


def test_trailers_and_chunk_extensions_pass_both_ways(rig: Any) -> None:
    request = b"3;a=b\r\nabc\r\n0;last\r\nX-Sum: 1\r\nx-sum: 2\r\n\r\n"
    answer = b'5;x="y"\r\nhello\r\n0\r\nServer-Timing: a;dur=1\r\nX-Two:\r\n\r\n'

    async def upstream(peer: Any) -> None:
        assert b"\r\nTrailer: X-Sum\r\n" in await peer.head()
        assert await peer.exactly(len(request)) == request
        await peer.write(b"HTTP/1.1 200 OK\r\nTrailer: Server-Timing\r\nTransfer-Encoding: chunked\r\n\r\n" + answer)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            head = b"POST / HTTP/1.1\r\nHost: t\r\nConnection: close\r\nTrailer: X-Sum\r\n"
            got = await tap.ask(head + b"Transfer-Encoding: chunked\r\n\r\n" + request)
            assert b"\r\nTrailer: Server-Timing\r\n" in got.head
            assert got.body == answer

    rig.run(scenario())


def test_encoded_bodies_pass_untouched(rig: Any) -> None:
    requested = gzip.compress(b'{"prompt": [1, 2, 3]}')
    answered = gzip.compress(b'data: {"choices": []}\n\n' * 50)
    framed = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (7, answered[:7], len(answered) - 7, answered[7:])

    async def upstream(peer: Any) -> None:
        assert b"\r\nContent-Encoding: gzip\r\nAccept-Encoding: gzip, br\r\n" in await peer.head()
        assert await peer.exactly(len(requested)) == requested
        await peer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + framed)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
            head += b"Accept-Encoding: gzip, br\r\nContent-Length: %d\r\n\r\n" % len(requested)
            got = await tap.ask(head + requested)
            assert b"\r\ncontent-encoding: gzip\r\n" in got.head
            assert got.body == framed

    rig.run(scenario())


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3;e\r\ndef\r\n0\r\nT: 1\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "answer", "expected"),
    [
        pytest.param(
            b"", NEXT, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnext", id="closes of itself"
        ),
        pytest.param(b"", CHUNKED, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcdef", id="gets no chunks"),
        pytest.param(
            b"Connection: keep-alive\r\n",
            CHUNKED,
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcdef",
            id="gets no chunks although it would stay",
        ),
        pytest.param(
            b"Connection: keep-alive, close\r\n",
            NEXT,
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnext",
            id="says both",
        ),
    ],
)
def test_a_client_of_http_1_0(rig: Any, headers: bytes, answer: bytes, expected: bytes) -> None:
    async def upstream(peer: Any) -> None:
        assert (await peer.head()).startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:")
        await peer.write(answer)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            got = await tap.ask(b"GET / HTTP/1.0\r\n" + headers + b"\r\n")
            assert (got.raw, got.was_reset) == (expected, False)

    rig.run(scenario())


def test_http_1_0_client_with_keep_alive(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        while True:
            await peer.head()
            await peer.write(NEXT)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for _ in range(3):
                await client.write(b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n")
                assert b"\r\nConnection: keep-alive\r\n" in await client.read_until(b"next")
            assert len(tap.peers) == 1

    rig.run(scenario())


def test_http_1_0_upstream_responds_until_close(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.0 200 OK\r\n\r\n", b"until ", b"the end")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            got = await tap.ask(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            assert got.raw == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
            assert not got.was_reset

    rig.run(scenario())


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 429, 500, 502, 503, 504, 529, 999])
def test_upstream_error_is_relayed(rig: Any, status: int) -> None:
    body = b'{"error": {"message": "no", "code": %d}}' % status
    answer = b"HTTP/1.1 %d Because\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(answer)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            assert await client.exactly(len(answer)) == answer
        assert tap.copies.outcomes == [("ok", None, status)]

    rig.run(scenario())
