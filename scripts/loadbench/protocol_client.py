"""The ceiling: what Protocols on this loop can send and take in at all. It counts events, keeps read times.

It knows what it is answered: no HTTP parsing, no JSON, no record but a line with the read times.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast
from urllib.parse import urlsplit

from scripts.loadbench.clientload import ClientLoad, keep, read_load
from wire.loop import run

END = b"0\r\n\r\n"
TOKEN = b'"token_ids":['


class Connection(asyncio.Protocol):
    """Connection that sends one request at a time."""

    def __init__(self, on_done: Callable[["Connection"], None]) -> None:
        self._on_done = on_done
        self.transport: asyncio.Transport | None = None
        self.request_id = ""
        self.sent_ns = 0
        self.read_ns: list[int] = []
        self.tokens: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def send(self, request_id: str, request: bytes) -> None:
        """Write a request."""
        assert self.transport is not None
        self.request_id, self.read_ns, self.tokens = request_id, [], []
        self.sent_ns = time.perf_counter_ns()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take one read."""
        at_ns = time.perf_counter_ns()
        found = data.count(TOKEN)
        if found:
            self.read_ns.append(at_ns)
            self.tokens.append(found)
        if data.endswith(END):
            self._on_done(self)


class Ceiling:
    """A run of the load."""

    def __init__(self, load: ClientLoad, out: TextIO) -> None:
        self._load, self._out = load, out
        address = urlsplit(load.url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        head = "POST /v1/completions HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}"
        self._heads = [head.format(self._host, self._port, len(body)).encode() for body in load.bodies]
        self._idle: list[Connection] = []
        self._next = 0
        self._in_flight = 0
        self._end_ns = time.perf_counter_ns() + round(load.duration_s * 1e9)
        self._over = asyncio.get_running_loop().create_future()

    async def closed(self) -> None:
        """So many requests in flight until the time is over."""
        for _ in range(self._load.parallel):
            await self._connect()
        for connection in self._take_idle():
            self._send(connection)
        await self._over

    async def open(self) -> None:
        """Each request at its time."""
        for _ in range(64):
            await self._connect()
        for _, due_ns in self._load.due_ns(time.perf_counter_ns()):
            wait_s = (due_ns - time.perf_counter_ns()) / 1e9
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if not self._idle:
                await self._connect()
            self._send(self._idle.pop())
        self._end_ns = 0
        await self._over

    def _take_idle(self) -> list[Connection]:
        idle, self._idle = self._idle, []
        return idle

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._done), self._host, self._port)
        self._idle.append(connection)

    def _send(self, connection: Connection) -> None:
        number, self._next = self._next, self._next + 1
        self._in_flight += 1
        place = number % len(self._heads)
        head = b"%b\r\nX-Request-Id: r%d\r\n\r\n" % (self._heads[place], number)
        connection.send(f"r{number}", head + self._load.bodies[place])

    def _done(self, connection: Connection) -> None:
        self._in_flight -= 1
        keep(self._out, connection.request_id, connection.sent_ns, connection.read_ns, connection.tokens)
        if self._load.rate is None and time.perf_counter_ns() < self._end_ns:
            self._send(connection)
            return
        self._idle.append(connection)
        if self._in_flight == 0 and time.perf_counter_ns() >= self._end_ns and not self._over.done():
            self._over.set_result(None)


async def main(out_path: Path, load: ClientLoad) -> None:
    """The load."""
    with out_path.open("w") as out:
        ceiling = Ceiling(load, out)
        await (ceiling.closed() if load.rate is None else ceiling.open())


if __name__ == "__main__":
    asked = read_load()
    run(main(asked.out, asked))
