"""A server that keeps time and does nothing else: tokens at moments that were fixed beforehand, from no engine.

What a client sees of it is the machine's part of what it sees of ``sim serve``: the network, the wake-ups, and whoever
else has the cores. It wakes by the same alarm on the same kind of loop.
"""

import asyncio
import heapq
import signal
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import cast

from wire.alarm import Sleeper

Schedule = Mapping[int, Sequence[int]]
"""A request's size in bytes, which tells requests apart, to when its tokens are due after it was read, ns."""
Moments = dict[int, tuple[int, list[int]]]
"""A request's size to when it was read and when its tokens were due, on the clock of ``perf_counter_ns``."""

EVENT = b'data: {"choices":[{"text":"' + b"x" * 170 + b'"}]}\n\n'
"""As long as one of ``/v1/completions``."""
TOKEN = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"


class BareSender:
    """Answers every request by its schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.moments: Moments = {}
        self._schedule = schedule
        self._sleeper = Sleeper()
        self._due: list[tuple[int, int, int, asyncio.Transport, bytes]] = []

    async def run(self) -> None:
        """Send what is due, for ever; cancel it to stop."""
        try:
            while True:
                if self._due:
                    await self._sleeper.sleep_until(self._due[0][0])
                else:
                    await self._sleeper.sleep()
                now_ns = perf_counter_ns()
                while self._due and self._due[0][0] <= now_ns:
                    *_, transport, data = heapq.heappop(self._due)
                    transport.write(data)
        finally:
            self._sleeper.close()

    def answer(self, size: int, transport: asyncio.Transport) -> None:
        """A request of so many bytes has been read."""
        read_ns = perf_counter_ns()
        due_ns = [read_ns + after_ns for after_ns in self._schedule[size]]
        self.moments[size] = (read_ns, due_ns)
        for place, at_ns in enumerate(due_ns):
            is_last = place == len(due_ns) - 1
            heapq.heappush(self._due, (at_ns, size, place, transport, TOKEN + END if is_last else TOKEN))
        self._sleeper.wake()


class _Connection(asyncio.Protocol):
    """Counts a request's bytes."""

    def __init__(self, sender: BareSender) -> None:
        self._sender = sender
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if separator and len(body) == int(head.rpartition(b"Content-Length: ")[2]):
            size, self._data = len(self._data), b""
            self._sender.answer(size, self._transport)


async def send(port: int, schedule: Schedule) -> Moments:
    """Serve until SIGTERM; when everything was due."""
    loop = asyncio.get_running_loop()
    sender = BareSender(schedule)
    server = await loop.create_server(lambda: _Connection(sender), "127.0.0.1", port, backlog=1024)
    running = loop.create_task(sender.run())
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.wait([running])
    server.close()
    return sender.moments
