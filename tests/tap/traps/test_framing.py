"""Requests of which two servers could make different messages: refused, and not a byte of them reaches the upstream.

Behind each stands a request that an upstream might have been made to see; it is never answered.
"""

from typing import Any

import pytest

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"
START = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"


def with_headers(*lines: bytes) -> bytes:
    return START + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


REFUSED_HEADS = {
    "length and chunked": with_headers(b"Content-Length: 4", b"Transfer-Encoding: chunked"),
    "chunked and length": with_headers(b"Transfer-Encoding: chunked", b"Content-Length: 4"),
    "two lengths": with_headers(b"Content-Length: 4", b"Content-Length: 5"),
    "one length twice": with_headers(b"Content-Length: 4", b"Content-Length: 4"),
    "a list of lengths": with_headers(b"Content-Length: 4, 4"),
    "a signed length": with_headers(b"Content-Length: +4"),
    "a negative length": with_headers(b"Content-Length: -4"),
    "a hexadecimal length": with_headers(b"Content-Length: 0x4"),
    "a length with an underscore": with_headers(b"Content-Length: 1_0"),
    "a length in other digits": with_headers("Content-Length: ٤".encode()),
    "an empty length": with_headers(b"Content-Length:"),
    "a length beyond counting": with_headers(b"Content-Length: 99999999999999999999"),
    "a length spelt with an underscore": with_headers(b"Content_Length: 4"),
    "a coding spelt with an underscore": with_headers(b"Transfer_Encoding: chunked"),
    "a coding that is not chunked": with_headers(b"Transfer-Encoding: xchunked"),
    "identity": with_headers(b"Transfer-Encoding: identity"),
    "gzip, then chunked": with_headers(b"Transfer-Encoding: gzip, chunked"),
    "chunked twice": with_headers(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "chunked and something else": with_headers(b"Transfer-Encoding: chunked", b"Transfer-Encoding: cow"),
    "chunked, quoted": with_headers(b'Transfer-Encoding: "chunked"'),
    "chunked with a parameter": with_headers(b"Transfer-Encoding: chunked;q=1"),
    "chunked behind a vertical tab": with_headers(b"Transfer-Encoding: \x0bchunked"),
    "chunked before a tab": with_headers(b"Transfer-Encoding: chunked\t"),
    "an empty coding": with_headers(b"Transfer-Encoding:"),
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folded header": with_headers(b"X: a", b" b"),
    "a folded coding": with_headers(b"Transfer-Encoding:", b" chunked"),
    "a header before the first": b"POST / HTTP/1.1\r\n Host: t\r\nHost: t\r\n\r\n",
    "a line ended by LF alone": START + b"X: a\nContent-Length: 4\r\n\r\n",
    "a head ended by LF alone": START + b"Content-Length: 0\r\n\n",
    "a request line ended by LF alone": b"GET / HTTP/1.1\nHost: t\r\n\r\n",
    "CR alone within a value": START + b"X: a\rContent-Length: 4\r\n\r\n",
    "CR CR LF": START + b"X: a\r\r\n\r\n",
    "NUL in a value": with_headers(b"X: a\x00b"),
    "NUL in a name": with_headers(b"X\x00: a"),
    "a control character in a value": with_headers(b"X: a\x08b"),
    "a space before the colon": with_headers(b"Content-Length : 4"),
    "a tab before the colon": with_headers(b"Transfer-Encoding\t: chunked"),
    "no colon": with_headers(b"Content-Length 4"),
    "no name": with_headers(b": 4"),
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts in HTTP/1.0": b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: t\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two spaces in the request line": b"GET  / HTTP/1.1\r\nHost: t\r\n\r\n",
    "a space at the request line's end": b"GET / HTTP/1.1 \r\nHost: t\r\n\r\n",
    "a space before the request line": b" GET / HTTP/1.1\r\nHost: t\r\n\r\n",
    "a space in the target": b"GET /a HTTP/1.1\r\nX: HTTP/1.1\r\nHost: t\r\n\r\n".replace(b"/a ", b"/a b "),
    "a control character in the target": b"GET /\x01 HTTP/1.1\r\nHost: t\r\n\r\n",
    "a target without a slash": b"GET nowhere HTTP/1.1\r\nHost: t\r\n\r\n",
    "a target of another scheme": b"GET ftp://t/ HTTP/1.1\r\nHost: t\r\n\r\n",
    "an asterisk for GET": b"GET * HTTP/1.1\r\nHost: t\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: t\r\n\r\n",
    "a method that is none": b"G<T / HTTP/1.1\r\nHost: t\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version of two digits": b"GET / HTTP/1.10\r\nHost: t\r\n\r\n",
    "another protocol": b"DESCRIBE / RTSP/1.0\r\nHost: t\r\n\r\n",
    "a head too large": with_headers(b"X: " + b"x" * 70_000),
}


@pytest.mark.parametrize("head", REFUSED_HEADS.values(), ids=REFUSED_HEADS)
def test_ambiguous_heads_are_rejected(rig: Any, head: bytes) -> None:
    async def upstream(peer: Any) -> None:
        raise AssertionError("a refused request reached the upstream")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(head + b"0\r\n\r\n" + SMUGGLED)
            assert answer.status in {400, 405, 431, 501, 505}
            assert b"\r\nConnection: close\r\n" in answer.head
            assert answer.raw.count(b"HTTP/1.1 ") == 1
            assert tap.copies.exchanges == []

    rig.run(scenario())


REFUSED_CHUNKS = {
    "no number": b"x\r\n",
    "an empty size": b"\r\n",
    "a sign": b"+1\r\na\r\n",
    "a prefix": b"0x1\r\na\r\n",
    "a space before": b" 1\r\na\r\n",
    "a space behind": b"1 \r\na\r\n",
    "a size beyond counting": b"1" * 16 + b"\r\n",
    "a size line without end": b"1;" + b"x" * 2000,
    "an extension with LF": b"1;a\nb\r\nx\r\n",
    "an extension with CR": b"1;a\rb\r\nx\r\n",
    "an extension with NUL": b"1;a\x00b\r\nx\r\n",
    "a size ended by LF alone": b"1\na\r\n",
    "data longer than its size": b"1\r\nab\r\n",
    "data ended by LF alone": b"1\r\na\n",
    "data ended by CR and more": b"1\r\na\rX",
    "a trailer without a colon": b"0\r\nGET /smuggled HTTP/1.1\r\n\r\n",
    "a trailer that is a length": b"0\r\nContent-Length: 30\r\n\r\n",
    "a trailer that is a coding": b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a trailer that is a host": b"0\r\nHost: other\r\n\r\n",
    "a folded trailer": b"0\r\nA: b\r\n c\r\n\r\n",
    "trailers without end": b"0\r\n" + b"A: b\r\n" * 4000,
}


@pytest.mark.parametrize("chunks", REFUSED_CHUNKS.values(), ids=REFUSED_CHUNKS)
def test_ambiguous_chunks_are_rejected(rig: Any, chunks: bytes) -> None:
    """The head and what was right had passed by then; the upstream gets no end to them, and its connection is cut."""
    good = b"2\r\n{}\r\n"

    async def upstream(peer: Any) -> None:
        head = await peer.head()
        assert head.startswith(b"POST /v1/completions ")
        received = await peer.until_closed()
        assert (good + chunks).startswith(received)
        assert not received.endswith(b"0\r\n\r\n")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(with_headers(b"Transfer-Encoding: chunked"), good, chunks + b"0\r\n\r\n" + SMUGGLED)
            assert answer.status in {400, 431}
            assert answer.raw.count(b"HTTP/1.1 ") == 1
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, None)]

    rig.run(scenario())


def test_broken_chunks_truncate_the_response(rig: Any) -> None:
    """A started response cannot become an error, and must not look complete."""

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(with_headers(b"Transfer-Encoding: chunked"))
            await client.read_until(b"ok\r\n")
            await client.write(b"nonsense\r\n" + SMUGGLED)
            assert await client.until_closed() == b""
            await tap.upstream_left()

    rig.run(scenario())


ACCEPTED = {
    "names in lower case": (b"transfer-encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n"),
    "names and coding in upper case": (b"TRANSFER-ENCODING: CHUNKED", b"3\r\nabc\r\n0\r\n\r\n"),
    "no space behind the colon": (b"Content-Length:3", b"abc"),
    "many spaces behind the colon": (b"Content-Length:     3", b"abc"),
    "leading zeros": (b"Content-Length: 003", b"abc"),
    "extensions": (b"Transfer-Encoding: chunked", b'3;a=b;c="d;e"\r\nabc\r\n0;f\r\n\r\n'),
    "sizes in both cases and with zeros": (b"Transfer-Encoding: chunked", b"0003\r\nabc\r\n00\r\n\r\n"),
    "trailers": (b"Transfer-Encoding: chunked", b"3\r\nabc\r\n0\r\nSum: 1\r\nX-Two:\r\n\r\n"),
    "a body of line ends": (b"Content-Length: 4", b"\r\n\r\n"),
    "a body that looks like a request": (b"Content-Length: %d" % len(SMUGGLED), SMUGGLED),
}


@pytest.mark.parametrize(("header", "body"), ACCEPTED.values(), ids=ACCEPTED)
def test_unusual_but_valid_requests_are_unchanged(rig: Any, header: bytes, body: bytes) -> None:
    async def upstream(peer: Any) -> None:
        head = await peer.head()
        name, _, value = header.partition(b":")
        assert b"\r\n" + name + b": " + value.strip() + b"\r\n" in head
        assert await peer.exactly(len(body)) == body
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert await peer.until_closed() == b"", "nothing follows the body"

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            answer = await tap.ask(with_headers(header, b"Connection: close") + body)
            assert (answer.status, answer.body) == (200, b"ok")

    rig.run(scenario())


def test_chunked_body_split_at_every_byte(rig: Any) -> None:
    body = b"5;ext=1\r\nhel\r\n\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def upstream(peer: Any) -> None:
        for _ in range(1, len(body)):
            await peer.head()
            assert await peer.exactly(len(body)) == body
            await peer.write(ok)

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            for cut in range(1, len(body)):
                await client.write(with_headers(b"Transfer-Encoding: chunked") + body[:cut], body[cut:])
                assert await client.exactly(len(ok)) == ok
            assert len(tap.peers) == 1, "one kept connection, never out of step"

    rig.run(scenario())
