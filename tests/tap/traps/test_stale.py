"""Stale upstream connections: no request is lost."""

from typing import Any

import pytest

GET = b"GET / HTTP/1.1\r\nHost: t\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answering(*behind: bytes) -> Any:
    """An upstream that answers every request, each answer followed by these bytes as reads of their own."""

    async def upstream(peer: Any) -> None:
        while True:
            await peer.head()
            await peer.write(OK, *behind)

    return upstream


def test_upstream_close_is_detected_before_the_next_request(rig: Any) -> None:
    """Request and close arrive in one loop iteration, the request first: only a poll detects the close."""

    async def scenario() -> None:
        async with rig.tap(answering()) as tap:
            client = await tap.connect()
            for number in range(10):
                client.writer.write(GET)
                if number:
                    tap.peers[-1].close_at_once()
                assert await client.exactly(len(OK)) == OK, f"request {number}"
            assert len(tap.peers) == 10

    rig.run(scenario())


@pytest.mark.parametrize(
    "stray",
    [
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 4\r\n\r\nevil", id="an answer"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", id="a go-ahead"),
        pytest.param(b"\x00", id="a byte"),
    ],
)
def test_connection_with_unsolicited_bytes_is_not_reused(rig: Any, stray: bytes) -> None:
    """What it said would be read as the answer to the next request."""

    async def scenario() -> None:
        async with rig.tap(answering(stray)) as tap:
            client = await tap.connect()
            for number in range(1, 4):
                await client.write(GET)
                assert await client.exactly(len(OK)) == OK
                await tap.peers[-1].over()
                assert len(tap.peers) == number

    rig.run(scenario())


STREAM = (
    b"HTTP/1.1 200 OK\r\nServer: %b\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
    b"2\r\nok\r\n0\r\n\r\n"
)


@pytest.mark.parametrize(("server", "connections"), [(b"llama.cpp", 10), (b"uvicorn", 1)])
def test_llamacpp_connection_is_not_reused_after_a_stream(rig: Any, server: bytes, connections: int) -> None:
    """Its connection is not used again, seen closed or not: a request that crosses the close is lost."""
    answer = STREAM % server

    async def upstream(peer: Any) -> None:
        while True:
            await peer.head()
            await peer.write(answer)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for number in range(10):
                await client.write(GET)
                reported = await client.read_until(b"0\r\n\r\n")
                assert reported.endswith(b"2\r\nok\r\n0\r\n\r\n"), f"request {number}"
                assert b"Connection: close" not in reported, "the client's own connection stays"
            assert len(tap.peers) == connections

    rig.run(scenario())


@pytest.mark.parametrize("stray", [b"\r\n", b"\n", b"\r\n\r\n"])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(OK, id="length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", id="chunked"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\r\n", id="trailers"),
    ],
)
def test_empty_lines_after_a_response_are_dropped(rig: Any, answer: bytes, stray: bytes) -> None:
    """However the reads are cut: in the client's eyes they would begin its next answer."""
    complete = answer + stray
    cuts = range(len(answer) - 6, len(complete))

    async def upstream(peer: Any) -> None:
        await peer.head()
        cut = cuts[peer.number]
        await peer.write(complete[:cut], complete[cut:])
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for _ in cuts:
                await client.write(GET)
                assert await client.exactly(len(answer)) == answer
                await tap.peers[-1].over()
            assert len(tap.peers) == len(cuts), "no such connection is used again"

    rig.run(scenario())


def test_upstream_close_does_not_close_the_client(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert await peer.until_closed() == b"", "the tap closes it too, and sends nothing more there"

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for number in range(1, 4):
                await client.write(GET)
                assert await client.exactly(len(OK)) == OK
                assert len(tap.peers) == number
                await tap.upstream_left()

    rig.run(scenario())
