"""CPU that a streamed chunk costs a Python server: FastAPI, a bare ASGI application on uvicorn, an asyncio Protocol.

    python -m scripts.bench_chunks            # all three, one after another

Each serves so many streams on one core and writes a chunk to each of them every few milliseconds, as an engine's steps
do; the client reads on another core, in another process. All use uvloop and httptools.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
import uvicorn
import uvloop
from fastapi import FastAPI

CHUNK = b'data: {"id":"cmpl-0123456789abcdef","choices":[{"index":0,"text":" abc","finish_reason":null}]}\n\n'
STEP_S = 0.004
Writers = list[Callable[[], None]]
"""One per stream: writes its next chunk."""


class AsgiStream:
    """An ASGI application: one task per stream, woken for every chunk."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send chunks as they are asked for, until cancelled."""
        wanted = asyncio.Semaphore(0)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self._writers.append(wanted.release)
        while True:
            await wanted.acquire()
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})


class ProtocolStream(asyncio.Protocol):
    """The same without anything in between."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """A request is complete: its response begins."""
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._writers.append(lambda: self._transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)))


def client(port: int, streams: int) -> None:
    """Open the streams and read them until the server is gone."""
    poll, socks = select.epoll(), {}
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        socks[sock.fileno()] = sock
        poll.register(sock.fileno(), select.EPOLLIN)
    with contextlib.suppress(ConnectionError):
        while all([socks[number].recv(65536) for number, _ in poll.poll()]):  # noqa: C419 - read them all
            pass


async def serve(kind: str, listener: socket.socket, streams: int, chunks: int) -> None:
    """Serve one way, write the chunks, and print what they cost."""
    writers: Writers = []
    if kind == "protocol":
        await asyncio.get_running_loop().create_server(lambda: ProtocolStream(writers), sock=listener)
    else:
        app: Any = AsgiStream(writers)
        if kind == "fastapi":
            app, stream = FastAPI(), app
            app.router.add_route("/", stream, methods=["POST"])
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
        serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
        assert not serving.done()
    while len(writers) < streams:  # noqa: ASYNC110 - streams come when they come
        await asyncio.sleep(0.01)
    start_s = time.process_time()
    for _ in range(chunks):
        for write in writers:
            write()
        await asyncio.sleep(STEP_S)
    each_us = (time.process_time() - start_s) / streams / chunks * 1e6
    print(f"{kind}: {each_us:.1f} µs a chunk", flush=True)
    os._exit(0)  # streams never end, and nothing here needs an orderly one


def measure(kind: str, streams: int, chunks: int) -> None:
    """Measure one server and its client, on two cores."""
    cores = sorted(os.sched_getaffinity(0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    reading = multiprocessing.Process(target=client, args=(listener.getsockname()[1], streams))
    reading.start()
    os.sched_setaffinity(reading.pid or 0, {cores[-1]})
    os.sched_setaffinity(0, {cores[0]})
    uvloop.run(serve(kind, listener, streams, chunks))


def main() -> int:
    """Each kind in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--chunks", type=int, default=400, help="of each stream")
    args = parser.parse_args()
    for kind in ("fastapi", "asgi", "protocol"):
        one = multiprocessing.Process(target=measure, args=(kind, args.streams, args.chunks))
        one.start()
        one.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
