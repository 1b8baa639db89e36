"""The upstream of a benchmark: answers with bytes made beforehand, on the loop of the client that measures.

Client and upstream share a process, a loop and a clock, so a chunk can carry the time it was sent at, and neither costs
a context switch. What is asked for stands in the query string, which every proxy passes on: ``answer=stream`` goes on
until ``end_streams``, ``answer=first`` is one token and the end. ``tokens`` is the length of the prompt that usage
reports.
"""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter_ns
from typing import cast

TICK_S = 0.001
MAX_LATE_MS = 50
_TOKENS = re.compile(rb"[?&]tokens=(\d+)")

_EVENT = (
    b'data: {"id":"cmpl-4f1d2c3b5a69788796a5b4c3d2e1f001","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}],"usage":%s}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """``data`` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def usage(prompt_tokens: int, output_tokens: int) -> bytes:
    """The usage object of a response."""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        *(prompt_tokens, output_tokens, prompt_tokens + output_tokens),
    )


STAMP_DIGITS = 19
_STAMPED = _EVENT % (b"0" * STAMP_DIGITS, b"null", b"null")
_BEFORE_STAMP, _, _AFTER_STAMP = chunk(_STAMPED).partition(b"0" * STAMP_DIGITS)
_FIRST = _HEAD + chunk(_EVENT % (b" token", b"null", b"null"))


def last_chunks(prompt_tokens: int, output_tokens: int) -> bytes:
    """The end of a stream, its usage before it, as vLLM sends them."""
    final = _EVENT % (b"", b'"length"', usage(prompt_tokens, output_tokens))
    return chunk(final) + chunk(b"data: [DONE]\n\n") + _LAST


class Stream:
    """Response with a chunk at each of its gaps."""

    __slots__ = ("_engine", "_fd", "_gap", "_gaps_ms", "_transport", "chunks", "prompt_tokens")

    def __init__(self, engine: "Engine", transport: asyncio.Transport, gaps_ms: Sequence[int], first_gap: int) -> None:
        self._engine, self._transport = engine, transport
        self.prompt_tokens = 0
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._gaps_ms, self._gap = gaps_ms, first_gap
        self.chunks = 0

    @property
    def gone(self) -> bool:
        """Return whether the client has left."""
        return self._transport.is_closing()

    def next_gap_ms(self) -> int:
        """Time from this chunk to the next."""
        self._gap = (self._gap + 1) % len(self._gaps_ms)
        return self._gaps_ms[self._gap]

    def send(self) -> bool:
        """Send one chunk with the clock in it; False if nobody takes it any more.

        Past the transport, whose buffer is empty: a write there waits for the end of the loop's turn, this one is sent
        when its stamp says.
        """
        if self.gone:
            return False
        try:
            os.write(self._fd, b"%b%019d%b" % (_BEFORE_STAMP, perf_counter_ns(), _AFTER_STAMP))
        except OSError:
            self._engine.failed += 1
            return False
        self.chunks += 1
        self._engine.sent += 1
        return True

    def end(self) -> None:
        """Send the usage and the end, as vLLM does."""
        self._transport.write(last_chunks(self.prompt_tokens, self.chunks))


class EngineConnection(asyncio.Protocol):
    """Connection of a proxy or a client; its requests come one after another."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._head = b""
        self._owed = 0
        """Bytes of the request's body that have not come yet."""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer once the body is whole."""
        if self._owed:
            self._owed -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            self._owed = content_length(self._head[:end]) - (len(self._head) - end)
        if self._owed == 0:
            head, self._head = self._head, b""
            self._answer(head[: head.find(b"\r\n")])

    def _answer(self, request_line: bytes) -> None:
        assert self.transport is not None
        found = _TOKENS.search(request_line)
        prompt_tokens = int(found[1]) if found is not None else 0
        if b"answer=stream" in request_line:
            self.transport.write(_HEAD)
            stream = self._engine.begin_stream(self.transport)
            stream.prompt_tokens = prompt_tokens
        else:
            self.transport.write(_FIRST + last_chunks(prompt_tokens, 1))


def content_length(head: bytes) -> int:
    """A head's Content-Length, 0 without one."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    return int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


class Engine:
    """Chunks of all streams in ticks of a millisecond: a tick's chunks are sent together, as a decode step's are."""

    def __init__(self) -> None:
        self.sent = 0
        """Chunks of streams, the last ones aside."""
        self.failed = 0
        """Chunks that could not be sent: the connection was gone or full."""
        self.gaps_ms: Sequence[int] = [20]
        """Gaps of the streams that begin from now on, each stream at another place of the cycle."""
        self.streams: set[Stream] = set()
        """Those that have not ended, nor been left."""
        self._begun = 0
        self._held: list[Stream] | None = None
        self._wheel: defaultdict[int, list[Stream]] = defaultdict(list)
        self._tick = 0
        self._slip_ms = 0
        """How far the ticks are behind the clock for good."""
        self._ticking: asyncio.TimerHandle | None = None

    async def listen(self) -> int:
        """Listen on a free port of this machine; returns it."""
        server = await asyncio.get_running_loop().create_server(
            lambda: EngineConnection(self), "127.0.0.1", 0, backlog=4096
        )
        return int(server.sockets[0].getsockname()[1])

    def begin_stream(self, transport: asyncio.Transport) -> Stream:
        """Send the first chunk in the next tick, or once the engine lets go, and the others at their gaps."""
        self._begun += 1
        stream = Stream(self, transport, self.gaps_ms, 7 * self._begun % len(self.gaps_ms))
        self.streams.add(stream)
        if self._ticking is None:
            self._tick = now_ms() - self._slip_ms
            self._advance()
        if self._held is None:
            self._wheel[self._tick + 1].append(stream)
        else:
            self._held.append(stream)
        return stream

    def hold(self) -> None:
        """Send nothing of the streams that begin from now on until ``let_go``, so that all of them are as long."""
        self._held = []

    def let_go(self) -> None:
        """Begin what was held, spread over the longest gap."""
        held, self._held = self._held or [], None
        for number, stream in enumerate(held):
            self._wheel[self._tick + 1 + number * max(self.gaps_ms) // len(held)].append(stream)

    def end_streams(self) -> None:
        """End every stream that is still there."""
        for stream in self.streams:
            if not stream.gone:
                stream.end()
        self.streams.clear()
        self._wheel.clear()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def _advance(self) -> None:
        """Send what is due up to now; a tick that came late sends what those it missed would have.

        An engine that gets no time to keep up slows down, as one that computes would, in place of sending ever more.
        """
        wheel = self._wheel
        late_ms = now_ms() - self._slip_ms - self._tick
        self._slip_ms += max(0, late_ms - MAX_LATE_MS)
        for _ in range(min(late_ms, MAX_LATE_MS)):
            self._tick += 1
            for stream in wheel.pop(self._tick, ()):
                if stream.send():
                    wheel[self._tick + stream.next_gap_ms()].append(stream)
                else:
                    self.streams.discard(stream)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._advance)


def now_ms() -> int:
    """The shared clock in whole milliseconds."""
    return perf_counter_ns() // 1_000_000
