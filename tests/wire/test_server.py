"""The server half against raw bytes on real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import until
from tests.wire.timedclient import listen
from wire.framing import ChunkedBody
from wire.server import BODY_STALL_S, ClientConnection, RequestHead, Server


@dataclass
class Echo:
    """Answers each request with its method, target and body, once the body is complete."""

    head: RequestHead
    connection: ClientConnection
    body: bytes = b""
    raw: bytes = b""
    gone: bool = False
    log: list["Echo"] = field(default_factory=list)

    def request_body(self, raw: bytes, data: bytes) -> None:
        self.raw += raw
        self.body += data

    def request_end(self) -> None:
        answer = b"%b %b %b" % (self.head.method, self.head.target, self.body)
        self.connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        self.connection.finish(keep_alive=True)

    def client_gone(self) -> None:
        self.gone = True

    def pause_response(self) -> None: ...

    def resume_response(self) -> None: ...


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def converse(
    talk: Talk,
    handler: type[Echo] = Echo,
    opened: list[Echo] | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    body_stall_s: float = BODY_STALL_S,
) -> list[Echo]:
    """Run a server and a client script; return the handlers that the server created."""
    opened = [] if opened is None else opened

    def new_handler(head: RequestHead, connection: ClientConnection) -> Echo:
        connection.check_integrity()
        opened.append(handler(head, connection))
        return opened[-1]

    async def main() -> None:
        server = Server(new_handler, body_stall_s=body_stall_s)
        port = await listen(server)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            await talk(reader, writer)
            writer.close()
            await server.drain(5)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    return opened


async def response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : h\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 70_000, 431),
    ],
)
def test_ambiguous_request_is_rejected(request_bytes: bytes, status: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request_bytes)
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close" in await reader.read()

    assert converse(talk) == []


class Eager(Echo):
    """Begins its response with the first piece of the request's body."""

    def request_body(self, raw: bytes, data: bytes) -> None:
        if not self.raw:
            self.connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        super().request_body(raw, data)


BAD_CHUNK = b"1\r\nab\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


class Flood(Echo):
    """Answers with more than the sockets' buffers take."""

    printed: list[str]

    def request_end(self) -> None:
        self.printed = []
        size = 1 << 24
        self.connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))

    def pause_response(self) -> None:
        self.printed.append("pause")

    def resume_response(self) -> None:
        self.printed.append("resume")


def test_half_close_aborts_an_unread_response() -> None:
    """Waiting for the response to leave first would wait for a client that has gone."""
    opened: list[Echo] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await until(lambda: bool(opened) and opened[0].printed == ["pause"])  # type: ignore[attr-defined]
        writer.write_eof()
        await until(lambda: opened[0].gone)

    converse(talk, Flood, opened)


class Refusing(Echo):
    """Turns every request down with its head."""

    def __init__(self, head: RequestHead, connection: ClientConnection) -> None:
        super().__init__(head, connection)
        connection.refuse(501, "no")


def test_rejected_upload_can_read_the_response() -> None:
    """A plain close would reset the connection under megabytes in flight, and the answer with it."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 8000000\r\n\r\n" + b"x" * 4_000_000)
        await asyncio.sleep(0.05)
        assert (await reader.read()).startswith(b"HTTP/1.1 501 ")

    (handler,) = converse(talk, Refusing)
    assert handler.raw == b""


class Stalled(Echo):
    """Takes no more of a request than its head, and never answers."""

    def __init__(self, head: RequestHead, connection: ClientConnection) -> None:
        super().__init__(head, connection)
        connection.pause_reading()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_disconnect_is_detected_while_not_reading(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n" + b"x" * 50)
        await writer.drain()
        await until(lambda: bool(opened))
        writer.close()
        await until(lambda: opened[0].gone)

    opened: list[Echo] = []
    converse(talk, Stalled, opened, new_loop)


HALF = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhalf"


def test_stalled_body_aborts_a_started_response() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HALF)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""

    (handler,) = converse(talk, Eager, body_stall_s=0.1)
    assert handler.gone


def test_unread_body_does_not_stall() -> None:
    """Not the client keeps the handler waiting, but the handler the client."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HALF)
        await asyncio.sleep(0.4)
        assert not opened[0].gone
        opened[0].connection.resume_reading()
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")

    opened: list[Echo] = []
    converse(talk, Stalled, opened, body_stall_s=0.1)


class Inviting(Echo):
    """Asks for the body that the client holds back."""

    def __init__(self, head: RequestHead, connection: ClientConnection) -> None:
        super().__init__(head, connection)
        if head.values(b"expect") == [b"100-continue"]:
            connection.write_informational(b"HTTP/1.1 100 Continue\r\n\r\n")


def test_100_continue_does_not_start_the_response() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(BAD_CHUNK)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    converse(talk, Inviting)


@settings(max_examples=80, deadline=None)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    following=st.binary(max_size=10),
    lenient=st.booleans(),
)
def test_chunked_body_end_at_any_split(chunks: list[bytes], cuts: list[int], following: bytes, lenient: bool) -> None:
    message = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    stream = message + following
    body, passed, actual, at = ChunkedBody(lenient=lenient), b"", b"", 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        piece = stream[at:cut]
        raw, data, consumed = body.feed(piece)
        passed += raw
        actual += data
        at += consumed
        if consumed < len(piece):
            break
    assert (body.complete, body.odd) == (True, False)
    assert passed == message
    assert actual == b"".join(chunks)
    assert at == len(message)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_upload_of_tiny_chunks_yields_to_other_clients(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Between two reads of another client, at most the chunks of one turn of the upload are parsed."""
    sizes: list[int] = []
    between: list[int] = []

    class Counting(Echo):
        def request_body(self, raw: bytes, data: bytes) -> None:
            sizes.append(len(data))

    def new_handler(head: RequestHead, connection: ClientConnection) -> Echo:
        if head.method == b"GET":
            between.append(len(sizes))
        return (Counting if head.method == b"POST" else Echo)(head, connection)

    async def main() -> None:
        server = Server(new_handler)
        port = await listen(server)
        _, upload = await asyncio.open_connection("127.0.0.1", port)
        reader, second = await asyncio.open_connection("127.0.0.1", port)
        upload.write(b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000)
        for _ in range(20):
            second.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b"GET / "))
        while sum(sizes) < 100_000:  # noqa: ASYNC110  the handler has no event for a read
            await asyncio.sleep(0)
        for writer in (upload, second):
            writer.close()
        await server.drain(1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert max(sizes) <= 512
    assert between[-1] < 100, "it was served while the upload went on"
