"""Heads are relayed unchanged: status, reason, order, case, duplicates; hop-by-hop headers are removed."""

from typing import Any

import pytest

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"


def test_error_response_headers_are_relayed(rig: Any) -> None:
    head = (
        b"HTTP/1.1 429 Slow Down, Please\r\nretry-AFTER: 7\r\nSet-Cookie: a=1\r\nx-ratelimit-remaining: 0\r\n"
        b"Set-Cookie: b=2\r\nSET-COOKIE: a=1\r\nX-Empty: \r\nX-Colon: a:b: c\r\nX-Latin: \xe4\xff\r\n"
        b"Content-Length: 4\r\n"
    )

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(head + b"\r\nwait")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
            )
            assert answer.raw == head + b"Connection: close\r\n\r\nwait"
        assert tap.copies.outcomes == [("ok", None, 429)]

    rig.run(scenario())


def test_request_headers_are_relayed_with_a_new_host(rig: Any) -> None:
    headers = b"x-B: 1\r\nX-a: 2\r\nX-B: 3\r\nAuthorization: Bearer s\r\nCOOKIE: c=d\r\nX-Latin: \xe4\r\nX-Empty: \r\n"

    async def upstream(peer: Any) -> None:
        port = peer.writer.get_extra_info("sockname")[1]
        assert await peer.head() == b"GET /x HTTP/1.1\r\nhOst: 127.0.0.1:%d\r\n%b\r\n" % (port, headers)
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(b"GET /x HTTP/1.1\r\nhOst: t\r\nConnection: close\r\n" + headers + b"\r\n")
            assert answer.status == 200

    rig.run(scenario())


def test_hop_by_hop_headers_are_removed(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        head = await peer.head()
        lines = head.split(b"\r\n")[2:]
        assert lines == [b"Accept: a", b"Content-Length: 2", b"X-Kept: 1", b"", b""]
        await peer.exactly(2)
        await peer.write(
            b"HTTP/1.1 200 OK\r\nConnection: keep-alive, x-SECRET\r\nKeep-Alive: timeout=5\r\nX-Secret: hop\r\n"
            b"Proxy-Connection: keep-alive\r\nUpgrade: h2c\r\nX-Kept: 1\r\nContent-Length: 2\r\n\r\nok"
        )

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            # Naming the framing headers there does not get rid of them: that would change what the body is.
            answer = await tap.ask(
                b"POST / HTTP/1.1\r\nHost: t\r\nAccept: a\r\nConnection: close, X-Hop ,content-length,host\r\n"
                b"Connection: X-Other\r\nX-Hop: 1\r\nx-hop: 2\r\nX-Other: 3\r\nTE: trailers\r\nKeep-Alive: 1\r\n"
                b"Proxy-Connection: x\r\nUpgrade: h2c\r\nContent-Length: 2\r\nX-Kept: 1\r\n\r\n{}"
            )
            assert answer.raw == (b"HTTP/1.1 200 OK\r\nX-Kept: 1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    rig.run(scenario())


@pytest.mark.parametrize(
    ("target", "base_path", "seen"),
    [
        (b"/v1/x?a=b%20c&a=&d=/../;e='\"|{}", "", b"/v1/x?a=b%20c&a=&d=/../;e='\"|{}"),
        (b"/%2e%2e//a/./b", "", b"/%2e%2e//a/./b"),
        (b"//host/path", "", b"//host/path"),
        (b"/?", "", b"/?"),
        (b"/v1?u=http://x/y", "", b"/v1?u=http://x/y"),
        (b"/models", "/gate/v1", b"/gate/v1/models"),
        (b"http://t/v1/x?y=z", "", b"/v1/x?y=z"),
        (b"http://t:80/v1", "/gate", b"/gate/v1"),
        (b"https://t/a", "", b"/a"),
        (b"http://t", "", b"/"),
        (b"HTTP://t/x", "", b"/x"),
        ("/v1/é?ü".encode(), "", "/v1/é?ü".encode()),
        (b"http://t?q=/a", "", b"/?q=/a"),
        (b"/" + b"a" * 30_000, "", b"/" + b"a" * 30_000),
    ],
)
def test_targets_are_unchanged_and_absolute_targets_lose_the_host(
    rig: Any, target: bytes, base_path: str, seen: bytes
) -> None:
    async def upstream(peer: Any) -> None:
        assert (await peer.head()).startswith(b"GET " + seen + b" HTTP/1.1\r\n")
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream, base_path=base_path) as tap:
            assert (await tap.ask(GET.replace(b" / ", b" " + target + b" "))).status == 200

    rig.run(scenario())


def test_options_asterisk(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        assert (await peer.head()).startswith(b"OPTIONS * HTTP/1.1\r\n")
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream, base_path="/gate") as tap:
            assert (await tap.ask(GET.replace(b"GET /", b"OPTIONS *"))).status == 200

    rig.run(scenario())


def test_head_size_limit(rig: Any) -> None:
    large = b"".join(b"X-%d: %b\r\n" % (number, b"v" * 480) for number in range(120))  # 59 KB

    async def upstream(peer: Any) -> None:
        head = await peer.head()
        assert large in head
        await peer.write(b"HTTP/1.1 200 OK\r\n" + large + b"Content-Length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(GET[:-2] + large + b"\r\n")
            assert large in answer.head
            refused = await tap.ask(GET[:-2] + large + large + b"\r\n")
            assert refused.status == 431
            endless = await tap.ask(GET[:-2] + b"X: " + b"x" * 70_000)
            assert endless.status == 431, "refused before its end has come"
            assert len(tap.peers) == 1

    rig.run(scenario())


def test_heads_split_at_every_byte(rig: Any) -> None:
    request = b"GET /a?b HTTP/1.1\r\nHost: t\r\nX: y\r\n\r\n"
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 Fine\r\nA: b\r\nContent-Length: 2\r\n\r\nok"
    cuts = range(1, max(len(request), len(answer)))

    async def upstream(peer: Any) -> None:
        for cut in cuts:
            assert (await peer.head()).startswith(b"GET /a?b HTTP/1.1\r\nHost: 127.0.0.1")
            await peer.write(answer[:cut], answer[cut:])

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for cut in cuts:
                await client.write(request[:cut], request[cut:])
                assert await client.exactly(len(answer)) == answer
            assert len(tap.peers) == 1

    rig.run(scenario())


def test_leading_empty_lines_are_skipped(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(OK)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            assert (await tap.ask(b"\r\n" * 400_000, b"\r", b"\n" + GET)).status == 200

    rig.run(scenario())


def test_unreachable_upstream_is_a_502(rig: Any, free_port: int) -> None:
    async def nobody(peer: Any) -> None: ...

    async def scenario() -> None:
        async with rig.tap(nobody, upstream_port=free_port) as tap:
            answer = await tap.ask(GET)
            assert answer.status == 502
            assert b"connect_refused" in answer.body

    rig.run(scenario())
