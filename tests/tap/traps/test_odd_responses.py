"""Responses framed wrongly whose end is certain: whole to the client where nginx 1.22 delivers them, and recorded so.

nginx's word on each case was taken on raw sockets, proxy_buffering off. The tap passes framing on as it should have
been, because the next reader may be stricter; where it cuts what nginx lets pass, the reason stands beside it.
"""

import asyncio
from typing import Any

import pytest

H = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: 5\r\n"
HELLO = b"5\r\nhello\r\n0\r\n\r\n"
ASKING = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"

# Bytes of the upstream; what the client gets.
COMPLETE = {
    "a byte behind a length": (H + LENGTH + b"\r\nhello ", H + LENGTH + b"\r\nhello"),
    "a second response behind a length": (H + LENGTH + b"\r\nhello" + SECOND, H + LENGTH + b"\r\nhello"),
    "a byte behind the last chunk": (H + CHUNKED + b"\r\n" + HELLO + b" ", H + CHUNKED + b"\r\n" + HELLO),
    "a second response behind chunks": (H + CHUNKED + b"\r\n" + HELLO + SECOND, H + CHUNKED + b"\r\n" + HELLO),
    "one length twice": (H + LENGTH + LENGTH + b"\r\nhello", H + LENGTH + b"\r\nhello"),
    "a list of one length": (H + b"Content-Length: 5, 5\r\n\r\nhello", H + LENGTH + b"\r\nhello"),
    "a length beside chunks": (H + LENGTH + b"A: b\r\n" + CHUNKED + b"\r\n" + HELLO,
                               H + CHUNKED + b"A: b\r\n\r\n" + HELLO),
    "chunked twice": (H + CHUNKED + CHUNKED + b"\r\n" + HELLO, H + CHUNKED + b"\r\n" + HELLO),
    "sizes padded": (H + CHUNKED + b"\r\n5  \r\nhello\r\n0\t\r\n\r\n", H + CHUNKED + b"\r\n" + HELLO),
    "a size padded before its extension": (H + CHUNKED + b"\r\n5 ;a=b\r\nhello\r\n0\r\n\r\n",
                                           H + CHUNKED + b"\r\n" + HELLO),
    "a control character in an extension": (H + CHUNKED + b"\r\n5;\x01\r\nhello\r\n0\r\n\r\n",
                                            H + CHUNKED + b"\r\n" + HELLO),
    "a trailer that is a length": (H + CHUNKED + b"\r\n5\r\nhello\r\n0\r\nContent-Length: 5\r\nX: y\r\n\r\n",
                                   H + CHUNKED + b"\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n"),
    "a trailer that is none": (H + CHUNKED + b"\r\n5\r\nhello\r\n0\r\nnonsense\r\n\r\n",
                               H + CHUNKED + b"\r\n" + HELLO),
    "a head in LF": (b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", H + LENGTH + b"\r\nhello"),
    "a head of both line ends": (H + b"Content-Length: 5\n\r\nhello", H + LENGTH + b"\r\nhello"),
    "chunks in LF": (H + CHUNKED + b"\r\n5\nhello\n0\n\n", H + CHUNKED + b"\r\n" + HELLO),
    "a last line in LF": (H + CHUNKED + b"\r\n5\r\nhello\r\n0\r\n\n", H + CHUNKED + b"\r\n" + HELLO),
}  # fmt: skip


@pytest.mark.parametrize(("printed", "heard"), COMPLETE.values(), ids=COMPLETE)
def test_response_with_a_certain_end_is_complete(rig: Any, printed: bytes, heard: bytes) -> None:
    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(printed)
        assert await peer.until_closed() == b"", "no second request on a connection out of step"

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for _ in range(2):
                await client.write(ASKING)
                assert await client.exactly(len(heard)) == heard
            assert len(tap.peers) == 2
            await tap.upstream_left()
        assert tap.copies.outcomes == [("ok", "bad_response", 200)] * 2

    rig.run(scenario())


CUT = {
    "another length": H + LENGTH + b"Content-Length: 4\r\n\r\nhello",  # nginx believes the last, clients the first
    "a signed length": H + b"Content-Length: +5\r\n\r\nhello",  # nginx reads on until the close
    "a coding before chunked": H + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + HELLO,  # nobody asked for it
    "a control character in a value": H + b"X: \x01\r\n" + LENGTH + b"\r\nhello",  # clients drop the response
    "a line without a colon": H + b"nonsense\r\n" + LENGTH + b"\r\nhello",  # nginx makes a header of it
    "a folded header": H + b"X: a\r\n b\r\n" + LENGTH + b"\r\nhello",  # nginx: 502
    "a space before the colon": H + b"X : a\r\n" + LENGTH + b"\r\nhello",  # nginx: 502
    "a NUL in a value": H + b"X: a\0\r\n" + LENGTH + b"\r\nhello",  # nginx: 502
    "CR alone in a value": H + b"X: a\rb\r\n" + LENGTH + b"\r\nhello",  # nginx: 502
    "no name": H + b": a\r\n" + LENGTH + b"\r\nhello",  # nginx: 502
    "HTTP/0.9": b"hello\r\n\r\n",  # nginx passes it on, which no client reads
}


@pytest.mark.parametrize("printed", CUT.values(), ids=CUT)
def test_ambiguous_response_is_rejected(rig: Any, printed: bytes) -> None:
    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(printed)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            assert (await tap.ask(ASKING)).raw == b""
        assert tap.copies.outcomes == [("error", "bad_response", None)]

    rig.run(scenario())


def test_endless_head_times_out(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its bytes come: the clock runs from its first."""
    monkeypatch.setattr("wire.client.connection.HEAD_WAIT_S", 0.1)

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(H)
        while not peer.writer.is_closing():
            peer.writer.write(b"X")
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            assert (await tap.ask(ASKING)).raw == b""
        assert tap.copies.outcomes == [("error", "timeout", None)]

    rig.run(scenario())


@pytest.mark.parametrize(
    "reads", [[b"HTTP/1.1 100 Continue\r\n\r\n"], [b"HTTP/1.1 103 E\r\n", b"X: y\r\n\r\n"], [b"\r\n"]]
)
def test_no_timeout_after_an_informational_head(rig: Any, monkeypatch: pytest.MonkeyPatch, reads: list[bytes]) -> None:
    monkeypatch.setattr("wire.client.connection.HEAD_WAIT_S", 0.05)

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        for read in reads:
            await peer.write(read)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(ASKING)
            await client.read_until(b"\r\n\r\nok")
        assert tap.copies.outcomes == [("ok", None, 200)]

    rig.run(scenario())
