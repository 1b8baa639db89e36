"""Upper bound of throughput: asyncio Protocols that count events and store read times.

No HTTP parsing, no JSON, no record except a line with the read times.
"""

import asyncio
import time
from collections.abc import Callable
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
        self._transport: asyncio.Transport | None = None
        self.request_id = ""
        self.sent_ns = 0
        self.read_ns: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request_id: str, request: bytes) -> None:
        assert self._transport is not None
        self.request_id, self.read_ns, self.sent_ns = request_id, [], time.perf_counter_ns()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        at_ns = time.perf_counter_ns()
        if data.count(TOKEN):
            self.read_ns.append(at_ns)
        if data.endswith(END):
            self._on_done(self)


class Ceiling:
    """Throughput ceiling: a run of the load on bare Protocols."""

    def __init__(self, load: ClientLoad, out: TextIO) -> None:
        self._load, self._out, self._bodies = load, out, load.bodies()
        address = urlsplit(load.url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        head = "POST /v1/completions HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}"
        self._heads = [head.format(self._host, self._port, len(body)).encode() for body in self._bodies]
        self._idle: list[Connection] = []
        self._next = self._in_flight = 0
        self._sending = True
        self._end_ns = time.perf_counter_ns() + round(load.duration_s * 1e9)
        self._over = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Keep ``parallel`` requests in flight until the time is over, or send each request at its planned time."""
        for _ in range(self._load.parallel):
            self._idle.append(await self._connect())
        if self._load.rate is None:
            for _ in range(self._load.parallel):
                self._send(self._idle.pop())
        else:
            for due_ns in self._load.due_ns(time.perf_counter_ns()):
                await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
                self._send(self._idle.pop() if self._idle else await self._connect())
            self._sending = False
        await self._over

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: Connection(self._done), self._host, self._port))[1]

    def _send(self, connection: Connection) -> None:
        number, self._next = self._next, self._next + 1
        self._in_flight += 1
        index = number % len(self._heads)
        head = b"%b\r\nX-Request-Id: r%d\r\n\r\n" % (self._heads[index], number)
        connection.send(f"r{number}", head + self._bodies[index])

    def _done(self, connection: Connection) -> None:
        self._in_flight -= 1
        keep(self._out, connection.request_id, connection.sent_ns, connection.read_ns)
        if self._load.rate is None:
            self._sending = time.perf_counter_ns() < self._end_ns
            if self._sending:
                self._send(connection)
                return
        self._idle.append(connection)
        if self._in_flight == 0 and not self._sending and not self._over.done():
            self._over.set_result(None)


async def main() -> None:
    load = read_load()
    with load.open() as out:
        await Ceiling(load, out).run()


if __name__ == "__main__":
    run(main())
