"""Hostile clients and a hostile upstream: each actor is a function that runs in a process of its own."""

import asyncio
import gzip
import itertools
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

from scripts.proxybench.engine import unary_response

MB = 1_000_000
PIECE = 1 << 16
PATIENCE_S = 20.0
ODD_FIELDS = ("model", "messages", "prompt", "max_tokens", "n", "stream", "tools", "user", "metadata", "cache_salt")
PROBE_BODY = b'{"model":"m","prompt":[1]}'
PROBE = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(PROBE_BODY), PROBE_BODY)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = CHUNKED[:-2] + b"Content-Type: text/event-stream\r\n\r\n"
SESSION = b"hostile"
BIG = 8 * MB
"""Bytes of a response that nobody reads."""


def posting(say: bytes, *headers: bytes, body: bytes = b"{}") -> bytes:
    """A request to which the upstream says ``say``."""
    fields = [b"Host: t", b"X-Session-ID: " + SESSION, b"Content-Length: %d" % len(body), *headers]
    head = [b"POST /v1/chat/completions?say=%b HTTP/1.1" % say, *fields]
    return b"\r\n".join([*head, b"", body])


# The upstream.


def said(say: str, mb: float) -> Iterator[bytes]:
    """What the upstream says, in pieces; ``mb``: how much of it."""
    pieces = int(mb * MB) // PIECE
    if say == "trailers":
        yield CHUNKED + b"0\r\n"
        yield from [b"X: y\r\n" * (PIECE // 6)] * pieces
    elif say == "trailerline":
        yield CHUNKED + b"0\r\nX: "
        yield from [b"x" * PIECE] * pieces
    elif say == "informational":
        yield from [b"HTTP/1.1 103 E\r\n\r\n" * (PIECE // 18)] * pieces
    elif say == "tiny":
        yield STREAM
        yield from [b"1\r\nx\r\n" * (PIECE // 6)] * pieces
        yield b"0\r\n\r\n"
    elif say == "event":
        yield STREAM + b"6\r\ndata: \r\n"
        yield from [b"800\r\n" + b"x" * 2048 + b"\r\n"] * int(mb * MB / 2048)
        yield b"2\r\n\n\n\r\n0\r\n\r\n"
    elif say == "big":
        yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG + b"x" * BIG
    else:
        yield unary_response(1)


class HostileUpstream:
    """Says what it is asked for; once armed, its metrics never end."""

    def __init__(self, mb: float) -> None:
        self._mb = mb
        self._armed = False

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection's requests."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await read_body(reader, head)
                target = head.split(b" ", 2)[1].decode()
                self._armed = self._armed or target == "/arm"
                if target == "/metrics" and self._armed:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                    while True:
                        writer.write(b"vllm:a 1\n" * 8000)
                        await writer.drain()
                for piece in said(target.partition("say=")[2], self._mb):
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def read_body(reader: asyncio.StreamReader, head: bytes) -> None:
    """Read a request's body to its end."""
    if b"chunked" in head.lower():
        last = b""
        while not last.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 18)
            if not piece:
                raise ConnectionError
            last = (last + piece)[-16:]
        return
    _, _, length = head.lower().partition(b"content-length: ")
    await reader.readexactly(int(length.split(b"\r\n")[0] or 0))


def serve(port: int, mb: float) -> None:
    """Be the upstream until the process ends."""

    async def main() -> None:
        upstream = HostileUpstream(mb)
        server = await asyncio.start_server(upstream.converse, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    asyncio.run(main())


# The clients.


def connected(port: int) -> socket.socket:
    """A client's connection."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(port: int, request: bytes, wanted: int = 1) -> None:
    """Send, and read until so many responses came, or the end."""
    with connected(port) as sock:
        sock.settimeout(0.0)
        heads, tail = 0, b""
        deadline = time.monotonic() + PATIENCE_S
        view = memoryview(request)
        while heads < wanted and time.monotonic() < deadline:
            try:
                view = view[sock.send(view[:PIECE]) :] if view else view
            except BlockingIOError:
                time.sleep(0.001)
            try:
                piece = sock.recv(1 << 20)
            except BlockingIOError:
                time.sleep(0 if view else 0.001)
                continue
            if not piece:
                return
            heads += (tail + piece).count(b"HTTP/1.1 200")
            tail = piece[-11:]


def tiny_chunks(port: int, mb: float) -> None:
    """Upload in chunks of one byte."""
    head = posting(b"ok").replace(b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n")
    exchange(port, head + b"1\r\nx\r\n" * int(mb * MB / 6) + b"0\r\n\r\n")


def pipelined(port: int, mb: float) -> None:
    """Send very many requests at once on one connection."""
    count = int(mb * 1000)
    exchange(port, posting(b"ok") * count, wanted=count)


def dripped_heads(port: int, mb: float) -> None:
    """Send heads byte by byte on many connections."""
    socks = [connected(port) for _ in range(100)]
    for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * int(5 * mb):
        for sock in socks:
            sock.send(bytes([byte]))
        time.sleep(0.01)


def half_open(port: int, mb: float) -> None:
    """Open very many connections with half a head."""
    socks = [connected(port) for _ in range(int(50 * mb))]
    for sock in socks:
        sock.send(b"GET / HTTP/1.1\r\n")
    time.sleep(1.0)


def never_read(port: int, mb: float) -> None:
    """Ask for large responses and read none."""
    socks = [connected(port) for _ in range(int(2 * mb))]
    for sock in socks:
        sock.send(posting(b"big"))
    time.sleep(1.0 + mb / 20)


def gzip_bomb(port: int, mb: float) -> None:
    """Send a small request that is very large once decoded."""
    body = gzip.compress(b'{"messages":[' + b"{}," * int(mb * MB * 3) + b"{}]}", 9)
    exchange(port, posting(b"ok", b"Content-Encoding: gzip", body=body))
    time.sleep(1.0 + mb / 4)


def odd_json(port: int, mb: float) -> None:
    """Send fields of types and sizes that no client means, as plain and as cut JSON."""
    odd: list[object] = [None, -1, 1 << 63, 1e308, "", "\ud800", "x" * 20_000, [], {}, [[]], [None], {"": {}}]
    for field, value in itertools.product(ODD_FIELDS, odd):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], field: value}).encode()
        for sent in (body, body[:-2], b"[" * 2000 + body):
            exchange(port, posting(b"ok", body=sent))


def asking(say: bytes) -> Callable[[int, float], None]:
    """Ask the upstream for something that harms."""

    def ask(port: int, mb: float) -> None:
        exchange(port, posting(say, b"Connection: close"), wanted=1 << 30)

    return ask


def endless_metrics(port: int, mb: float) -> None:
    """Let the engine's metrics be without end."""
    exchange(port, b"GET /arm HTTP/1.1\r\nHost: t\r\n\r\n")
    time.sleep(1.0 + mb / 4)


ACTORS: dict[str, Callable[[int, float], None]] = {
    "client: chunks of 1 byte": tiny_chunks,
    "client: pipelined requests": pipelined,
    "client: dripped heads": dripped_heads,
    "client: half-open connections": half_open,
    "client: never reads": never_read,
    "upstream: chunks of 1 byte": asking(b"tiny"),
    "upstream: endless trailers": asking(b"trailers"),
    "upstream: a trailer line": asking(b"trailerline"),
    "upstream: endless 1xx": asking(b"informational"),
    "upstream: endless /metrics": endless_metrics,
    "recorder: odd JSON": odd_json,
    "recorder: gzip bomb": gzip_bomb,
    "recorder: one long SSE event": asking(b"event"),
}


def act(name: str, port: int, mb: float) -> None:
    """Be an actor; that the proxy cuts it is no error."""
    try:
        ACTORS[name](port, mb)
    except OSError:
        return


def act_in_turn(port: int, upstream: int, mb: float, rest_s: float) -> None:
    """Be one actor after another until the process ends, with rests between."""
    for name in itertools.cycle(ACTORS):
        act(name, upstream if "/metrics" in name else port, mb)
        time.sleep(rest_s)


def in_process(target: Callable[..., None], *given: object) -> BaseProcess:
    """Start a function in a process of its own."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=given, daemon=True)
    process.start()
    return process
