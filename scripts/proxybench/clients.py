"""Clients of the proxy benchmark: concurrent streams or sequential requests; latency from a timestamp per read."""

import asyncio
import json
from collections.abc import Iterable
from time import perf_counter_ns
from typing import NamedTuple, cast

END = b"0\r\n\r\n"


class Prompt(NamedTuple):
    """Token ids of a prompt, as JSON."""

    text: str
    tokens: int

    @classmethod
    def of_bytes(cls, size: int) -> "Prompt":
        tokens = size // 6
        return cls(json.dumps([10_000 + number % 50_000 for number in range(tokens)], separators=(",", ":")), tokens)

    def request(self, request_id: str, output_tokens: int) -> bytes:
        body = b'{"model":"m","prompt":%b,"max_tokens":%d,"stream":true}' % (self.text.encode(), output_tokens)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nX-Request-Id: %b\r\n" % request_id.encode()
        return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Client(asyncio.Protocol):
    """Connection with one request at a time and a timestamp per event of its response."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._last = b""
        self.events_ns: list[int] = []
        self._ended: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> "asyncio.Future[bool]":
        """Send a request; the future's result: the response is complete."""
        assert self._transport is not None
        self.events_ns, self._ended = [], asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._ended

    def data_received(self, data: bytes) -> None:
        """Timestamp the read first; an event ends with an empty line, which may be split over two reads."""
        at_ns = perf_counter_ns()
        self.events_ns += [at_ns] * (self._last + data).count(b"\n\n")
        self._last = data[-1:]
        if data.endswith(END):
            self._end(complete=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(complete=False)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self, *, complete: bool) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(complete)


async def connected(port: int, count: int) -> list[Client]:
    """Return clients, each with an open connection."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]


async def ended(responses: "Iterable[asyncio.Future[bool]]", timeout_s: float) -> int:
    """Wait for responses; return the number of complete responses."""
    done, _ = await asyncio.wait(list(responses), timeout=timeout_s)
    return sum(response.result() for response in done)
