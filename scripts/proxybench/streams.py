"""The load client of a benchmark: many streams at once, every read kept with its time, looked into afterwards."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns
from typing import cast

import numpy as np
import numpy.typing as npt

from scripts.proxybench.engine import STAMP_DIGITS

Floats = npt.NDArray[np.float64]

_STAMP = re.compile(rb'"text":"(\d{%d})"' % STAMP_DIGITS)
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A completion request's body, and how many tokens the engine is to say its prompt has."""

    body: bytes
    tokens: int


def target(prompt: Prompt, answer: str) -> str:
    """Target that makes the engine of the benchmark answer as wanted."""
    return f"/v1/completions?answer={answer}&tokens={prompt.tokens}"


def post(prompt: Prompt, answer: str) -> bytes:
    """The whole request."""
    head = b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (target(prompt, answer).encode(), len(prompt.body)) + prompt.body


class StreamClient(asyncio.Protocol):
    """Client of one request, sent as soon as connected; keeps its reads with their times."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.reads: list[tuple[int, bytes]] = []
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the response came whole."""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time before all else."""
        self.reads.append((perf_counter_ns(), data))
        if data.endswith(_END) and not self.ended.done():
            self.ended.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """A connection that goes before the response ended is a failure."""
        if not self.ended.done():
            self.ended.set_result(False)

    def close(self) -> None:
        """Give the connection up."""
        if self._transport is not None:
            self._transport.close()


async def open_streams(port: int, count: int, prompt: Prompt) -> list[StreamClient]:
    """``count`` connections, each with a stream asked for."""
    loop = asyncio.get_running_loop()
    request = post(prompt, "stream")
    made = [await loop.create_connection(lambda: StreamClient(request), "127.0.0.1", port) for _ in range(count)]
    return [client for _, client in made]


async def all_ended(clients: Sequence[StreamClient], timeout_s: float) -> int:
    """Wait for the ends; returns how many streams did not end as they should."""
    done, _ = await asyncio.wait([client.ended for client in clients], timeout=timeout_s)
    for client in clients:
        client.close()
    return len(clients) - sum(future.result() for future in done)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Values of a window's reads: one entry per chunk, gap or read."""

    latency_us: Floats
    """From the engine's send to the client's read, per chunk."""
    gap_ms: Floats
    """Between reads that brought chunks, per stream."""
    reads: int
    crowded_reads: int
    """Reads that brought more than one chunk: together on the wire, or held back and joined."""

    @property
    def crowded_share(self) -> float:
        """Share of reads with more than one chunk."""
        return self.crowded_reads / max(self.reads, 1)


def arrivals(clients: Sequence[StreamClient], since_ns: int, until_ns: int) -> Arrivals:
    """Chunks sent within the window. A chunk has come when its last byte has."""
    latency: list[float] = []
    gaps: list[float] = []
    reads = crowded = 0
    for client in clients:
        times, counts = [], []
        for at_ns, stamps in _chunks_by_read(client.reads):
            inside = [stamp for stamp in stamps if since_ns <= stamp < until_ns]
            latency += [(at_ns - stamp) / 1e3 for stamp in inside]
            if inside:
                times.append(at_ns)
                counts.append(len(stamps))
        gaps += [(after - before) / 1e6 for before, after in pairwise(times)]
        reads += len(counts)
        crowded += sum(count > 1 for count in counts)
    return Arrivals(np.array(latency), np.array(gaps), reads, crowded)


def _chunks_by_read(reads: Sequence[tuple[int, bytes]]) -> list[tuple[int, list[int]]]:
    """For each read its time and the stamps of the events that it completed."""
    found = []
    rest = b""
    for at_ns, data in reads:
        whole, end, rest = (rest + data).rpartition(b"\n\n")
        found.append((at_ns, [int(stamp) for stamp in _STAMP.findall(whole + end)]))
    return found


class WaitingClient(asyncio.Protocol):
    """Requests one after another on one connection; how long each one's first token, or its response, took."""

    def __init__(self, first: bytes = b"data: ", end: bytes = _END) -> None:
        """``first``: in the read that counts; ``end``: of a response."""
        self._first, self._end = first, end
        self._transport: asyncio.Transport | None = None
        self._first_ns = 0
        self._ended: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """The read with the first event is the one that counts."""
        at_ns = perf_counter_ns()
        if self._first_ns == 0 and self._first in data:
            self._first_ns = at_ns
        if data.endswith(self._end) and self._ended is not None:
            self._ended.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """A benchmark whose connection goes measures nothing."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError("the connection was lost while a response was waited for"))

    async def wait_us(self, request: bytes) -> float:
        """From the request's first byte to the read that counts."""
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._first_ns = 0
        started_ns = perf_counter_ns()
        self._transport.write(request)
        await self._ended
        return (self._first_ns - started_ns) / 1e3

    def close(self) -> None:
        """End the connection."""
        self._ended = None
        if self._transport is not None:
            self._transport.close()
