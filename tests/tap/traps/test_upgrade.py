"""Protocol upgrades: WebSocket and tunnels are refused, optional upgrades are ignored."""

from typing import Any

import pytest

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/realtime HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: t\r\nconnection: keep-alive, upgrade\r\nupgrade: h2c, WebSocket\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    ],
    ids=["websocket", "websocket among others", "tunnel"],
)
def test_websocket_and_connect_are_501(rig: Any, request_bytes: bytes) -> None:
    async def upstream(peer: Any) -> None:
        raise AssertionError("not for the upstream")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(request_bytes + b"\x81\x85\x00\x00\x00\x00hello")
            assert answer.status == 501
            assert b"\r\nContent-Type: application/json\r\n" in answer.head
            assert b"no WebSocket or tunnel" in answer.body

    rig.run(scenario())


def test_upgrade_offer_is_ignored(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        head = await peer.head()
        assert b"pgrade" not in head
        assert b"HTTP2-Settings" not in head
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(
                b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
                b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n"
            )
            assert (answer.status, answer.body) == (200, b"ok")

    rig.run(scenario())


def test_upgrade_request_with_body(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        assert await peer.exactly(5) == b"hello"
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            head = b"POST / HTTP/1.1\r\nHost: t\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\n"
            client = await tap.connect()
            await client.write(head + b"hello")
            assert await client.exactly(len(OK)) == OK

    rig.run(scenario())
