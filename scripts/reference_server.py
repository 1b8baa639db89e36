"""Reference server: prepared responses written at planned times, with a log of every write.

It uses little CPU, so that it is no bottleneck: three searches per request instead of parsing; pieces are written with
``write(2)``, because an event loop may delay its writes to the end of an iteration.

    python -m scripts.reference_server 8000 '{"ttft_low_ms": 20, "ttft_high_ms": 80, "gap_ms": 10}'

Its log is the ground truth of a client's TTFT. All times are from the monotonic clock that all processes share
(``time.perf_counter_ns``). The log has the last byte of a request and the write of the first token, so a client's
TTFT error is never negative: it includes the kernel's path in both directions and the client's delay. The tap's
benchmark runs the server on its client's event loop, which avoids context switches.
"""

import asyncio
import contextlib
import heapq
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple, cast

import httpx
import msgspec

from loadgen.core.draws import below, text_key
from scripts.processes import free_port, is_listening, serving
from wire.alarm import Alarm
from wire.loop import run as run_loop
from wire.process import module_command, module_environment

NS_PER_MS = 1_000_000
BACKLOG = 4096
DEFAULT_TOKENS = 16
TAIL = 512
"""Bytes at the end of a body that are searched first for ``max_tokens``: long prompts come first."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"\r\nx-request-id: *([!-~]+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')

FIRST_ID = 1000
ENVELOPE = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1, "model": "truth"}

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Token times and pieces of responses: the server's command line, as JSON."""

    ttft_low_ms: float = 0.0
    ttft_high_ms: float = 0.0
    """Time from a request's last byte to the first write, random by request id."""
    gap_ms: float = 0.0
    """Time between two writes; 0: all at once."""
    tick_ms: float = 0.0
    """Writes of all streams happen at multiples of this, like decode steps; 0: at their exact times."""
    tokens_per_write: int = 1
    """Events per write after the first; the first write has one event."""
    prompt_tokens: int = 256
    """Prompt tokens in usage: the server does not parse prompts."""

    def ttft_ns(self, request_id: str) -> int:
        low_ns, high_ns = (round(bound * NS_PER_MS) for bound in (self.ttft_low_ms, self.ttft_high_ms))
        return low_ns + below(text_key(request_id), high_ns - low_ns + 1)

    def on_tick(self, due_ns: int) -> int:
        tick_ns = max(1, round(self.tick_ms * NS_PER_MS))
        return -(-due_ns // tick_ns) * tick_ns


class Served(msgspec.Struct, array_like=True):
    """Log entry of a request, with the time of each token, in ns of the monotonic clock."""

    request_id: str
    """``X-Request-Id``, or a number, ``#7``."""
    received_ns: int
    """Start of the read with the request's last byte."""
    due_ns: int
    tokens: int
    writes: int
    """Number of writes of the complete stream."""
    writes_ns: list[int]
    """Time of each write, before the system call."""

    @property
    def ttft_ns(self) -> int | None:
        return self.writes_ns[0] - self.received_ns if self.writes_ns else None

    @property
    def last_write_ns(self) -> int | None:
        """Time of the stream's end; None: incomplete."""
        return self.writes_ns[-1] if len(self.writes_ns) == self.writes else None


class ServerLog(msgspec.Struct, frozen=True):
    """Log of the server: a token time series per request, and its CPU time."""

    served: list[Served]
    cpu_ns: int
    started_ns: int
    read_ns: int


@lru_cache(maxsize=256)
def stream_pieces(pace: Pace, tokens: int) -> tuple[bytes, ...]:
    """Return the pieces of a complete response; the first has the head and the first token."""
    events = [_event(index, last=index == tokens - 1) for index in range(tokens)]
    step = pace.tokens_per_write
    pieces = [HEAD + events[0], *(b"".join(events[at : at + step]) for at in range(1, tokens, step))]
    pieces[-1] += _usage(pace.prompt_tokens, tokens) + END
    return tuple(pieces)


def token_ids(tokens: int) -> Iterable[int]:
    return range(FIRST_ID, FIRST_ID + tokens)


def _event(index: int, *, last: bool) -> bytes:
    choice = {"index": 0, "text": f" t{index}", "logprobs": None, "finish_reason": "length" if last else None}
    choice |= {"stop_reason": None, "token_ids": [FIRST_ID + index]}
    return _chunk({**ENVELOPE, "choices": [choice], "usage": None})


def _usage(prompt_tokens: int, tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
    return _chunk({**ENVELOPE, "choices": [], "usage": usage})


def _chunk(event: dict[str, object]) -> bytes:
    data = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream(NamedTuple):
    """Token stream being written; ``served`` has the times of the pieces written so far."""

    connection: "_Connection"
    served: Served
    pieces: Sequence[bytes]
    gap_ns: int


class ReferenceServer:
    """Streams tokens for every completion at its pace, and logs the times."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        """Pace of new requests."""
        self._served: list[Served] = []
        self._due: list[tuple[int, int, _Stream]] = []
        self._pushed = 0
        self._alarm = Alarm(self._ring)
        self._started_ns = perf_counter_ns()

    async def listen(self, listener: socket.socket) -> None:
        await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=listener, backlog=BACKLOG)

    def log(self) -> ServerLog:
        return ServerLog(self._served, time.process_time_ns(), self._started_ns, perf_counter_ns())

    def pop_served(self) -> list[Served]:
        """Return the log entries since the last call, and clear the log."""
        served, self._served = self._served, []
        return served

    def serve(self, connection: "_Connection", head: bytes, body: bytes, received_ns: int) -> None:
        match = _REQUEST_ID.search(head)
        request_id = match[1].decode("ascii") if match else f"#{len(self._served)}"
        max_tokens = _MAX_TOKENS.search(body, max(0, len(body) - TAIL)) or _MAX_TOKENS.search(body)
        tokens = max(1, int(max_tokens[1])) if max_tokens else DEFAULT_TOKENS
        pace, pieces = self.pace, stream_pieces(self.pace, tokens)
        due_ns = pace.on_tick(received_ns + pace.ttft_ns(request_id))
        served = Served(request_id, received_ns, due_ns, tokens, len(pieces), [])
        self._served.append(served)
        stream = _Stream(connection, served, pieces, round(pace.gap_ms * NS_PER_MS))
        if due_ns == received_ns:
            self._write_next(stream)
        else:
            self._push(due_ns, stream)

    def _push(self, due_ns: int, stream: _Stream) -> None:
        self._pushed += 1
        heapq.heappush(self._due, (due_ns, self._pushed, stream))
        self._alarm.set(self._due[0][0])

    def _ring(self) -> None:
        while self._due and self._due[0][0] <= perf_counter_ns():
            self._write_next(heapq.heappop(self._due)[2])
        self._alarm.set(self._due[0][0] if self._due else None)

    def _write_next(self, stream: _Stream) -> None:
        """Write the next piece, or all remaining pieces; schedule the following write."""
        connection, served, pieces, gap_ns = stream
        written_ns = served.writes_ns
        last = len(written_ns) + 1 if gap_ns else len(pieces)
        for piece in pieces[len(written_ns) : last]:
            now_ns = perf_counter_ns()
            if not connection.write(piece):
                return
            written_ns.append(now_ns)
        if last < len(pieces):
            self._push(served.due_ns + last * gap_ns, stream)


class _Connection(asyncio.Protocol):
    """Connection of a client with sequential requests."""

    def __init__(self, server: ReferenceServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._head = b""
        self._body: list[bytes] = []
        self._missing_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._fd = self._transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        at_ns = perf_counter_ns()
        if self._missing_bytes:
            self._body.append(data)
            self._missing_bytes -= len(data)
        else:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._head, body = data[:end], data[end:]
            length = _LENGTH.search(self._head)
            self._body = [body]
            self._missing_bytes = (int(length[1]) if length else 0) - len(body)
        if self._missing_bytes <= 0:
            head, body = self._head, b"".join(self._body)
            self._head, self._body, self._missing_bytes = b"", [], 0
            self._answer(head, body, at_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def write(self, data: bytes) -> bool:
        """Write immediately; return False if the connection is closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        written = 0
        if transport.get_write_buffer_size() == 0:
            try:
                written = os.write(self._fd, data)
            except BlockingIOError:
                pass
            except OSError:
                transport.abort()
                return False
        if written < len(data):
            transport.write(data[written:])
        return True

    def _answer(self, head: bytes, body: bytes, at_ns: int) -> None:
        if head.startswith(b"POST"):
            self._server.serve(self, head, body, at_ns)
        elif head.startswith(b"GET /log"):
            self._respond_json(200, msgspec.msgpack.encode(self._server.log()))
        elif head.startswith((b"GET /v1/models", b"GET / ")):
            self._respond_json(200, b'{"object":"list","data":[{"id":"truth","object":"model"}]}')
        else:
            self._respond_json(404, b"{}")

    def _respond_json(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.write(head % (status, len(body)) + body)


async def _serve(port: int, pace: Pace) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ReferenceServer(pace).listen(socket.create_server(("127.0.0.1", port)))
    await ended.wait()


class ServerProcess(NamedTuple):
    """A running reference server."""

    url: str

    def log(self) -> ServerLog:
        response = httpx.get(f"{self.url}/log", trust_env=False, timeout=60.0).raise_for_status()
        return msgspec.msgpack.decode(response.content, type=ServerLog)


@contextlib.contextmanager
def reference_server(pace: Pace, log: Path, *, core: int | None = None) -> Iterator[ServerProcess]:
    """Run the server within the block, on ``core`` if given; ``log`` has its output."""
    port = free_port()
    command = module_command("scripts.reference_server", str(port), msgspec.json.encode(pace).decode())
    ready = partial(is_listening, port)
    with serving(command, ready, log, "the reference server", environment=module_environment(), core=core):
        yield ServerProcess(f"http://127.0.0.1:{port}")


if __name__ == "__main__":
    run_loop(_serve(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Pace)))
