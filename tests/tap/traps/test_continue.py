"""Expect: 100-continue: the client waits for the upstream's word, whatever it is; the tap adds none of its own."""

from typing import Any

import pytest

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


def test_100_continue_is_relayed_before_the_body(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        assert b"\r\nExpect: 100-continue\r\n" in await peer.head()
        await peer.write(CONTINUE)
        assert await peer.exactly(5) == b"hello"
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(HEAD)
            assert await client.exactly(len(CONTINUE)) == CONTINUE
            await client.write(b"hello")
            assert await client.exactly(len(OK)) == OK
        assert tap.copies.outcomes == [("ok", None, 200)]

    rig.run(scenario())


def test_final_response_instead_of_100_continue(rig: Any) -> None:
    """The body may still arrive, so later bytes are never parsed as a request."""

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 417 No\r\nContent-Length: 2\r\n\r\nno")
        assert await peer.until_closed() == b"", "half a request is left on no kept connection"

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(HEAD)
            assert (await client.read_until(b"\r\n\r\nno")).startswith(b"HTTP/1.1 417 No\r\n")
            await client.write(b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await client.until_closed() == b""
            assert len(tap.peers) == 1
            await tap.upstream_left()

    rig.run(scenario())


def test_client_that_does_not_wait_for_continue(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        assert await peer.exactly(5) == b"hello"
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            for request in ([HEAD + b"hello"], [HEAD, b"hello"]):
                client = await tap.connect()
                await client.write(*request)
                assert await client.exactly(len(OK)) == OK

    rig.run(scenario())


def test_malformed_body_after_continue_is_rejected(rig: Any) -> None:
    """A 1xx is no beginning of the response."""

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(CONTINUE)
        assert await peer.until_closed() == b""

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(HEAD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"))
            assert await client.exactly(len(CONTINUE)) == CONTINUE
            await client.write(b"nonsense\r\n")
            assert (await client.until_closed()).startswith(b"HTTP/1.1 400 ")
            await tap.upstream_left()

    rig.run(scenario())


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_informational_responses_are_relayed(rig: Any, version: bytes) -> None:
    early = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nlink: </b>\r\n\r\n" + CONTINUE

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(early[:30], early[30:] + OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(b"GET / HTTP/" + version + b"\r\nHost: t\r\nConnection: close\r\n\r\n")
            final = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            assert answer.raw == (early + final if version == b"1.1" else final)

    rig.run(scenario())
