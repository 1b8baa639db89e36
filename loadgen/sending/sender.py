"""The sender: a process that writes requests at their absolute times and stamps what comes back, and does nothing else.

Between a due time and its first byte lie one heap pop and one write: requests come here as bytes, ahead of need
(``loadgen/runs/shard.py`` builds them); what came back leaves as bytes with times, once a turn of the loop. Nothing
here parses a response or waits for the parser.
"""

import asyncio
import gc
import heapq
import itertools
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.sending.crossing import (
    Batch,
    Connected,
    Ended,
    Halt,
    Halted,
    Order,
    Orders,
    Pulse,
    SenderSetup,
    Unreachable,
    encode,
    to_sender,
)
from loadgen.sending.requestrun import RequestRun, Start
from tracefile.records.errors import failure_words
from wire.alarm import Alarm, Clock
from wire.client.connection import ServerConnection
from wire.client.pool import ConnectError, ConnectionPool
from wire.errors import LossKind
from wire.loop import run
from wire.process import FrameSocket, parent_socket
from wire.url import parse_url

MOST_KEPT_BYTES = max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 32)
"""Bound for all responses in flight; the shard needs as much again. Without a flood: millions of tokens."""
BATCH_BYTES = 8 << 20
"""Responses that are handed over at once."""
SPARE = 4
"""Idle connections kept open beyond those in use."""


class Connections:
    """Gives requests connections; those that find none wait in order for whichever is free or open first."""

    def __init__(self, pool: ConnectionPool, limit: int | None) -> None:
        """``limit``: most connections, equal to the limit of requests in flight; null: no limit."""
        self._pool = pool
        self._limit = limit
        self._waiting: deque[RequestRun] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    def start(self, request: RequestRun) -> None:
        connection = self._pool.take_idle()
        if connection is None:
            self._waiting.append(request)
            self._open()
            return
        request.begin(connection)
        if self._pool.num_idle < SPARE and len(self._opening) < SPARE and self._may_open():
            self._open()

    def start_anew(self, request: RequestRun) -> None:
        self._open(request)

    def serve(self) -> None:
        while self._waiting:
            if self._waiting[0].end_ns:
                self._waiting.popleft()
                continue
            connection = self._pool.take_idle()
            if connection is None:
                return
            self._waiting.popleft().begin(connection)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        self._pool.close()

    def _may_open(self) -> bool:
        return self._limit is None or self._pool.num_open + len(self._opening) < self._limit

    def _open(self, request: RequestRun | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(request))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, request: RequestRun | None) -> None:
        """Open a connection for this request, or for the first waiting one."""
        try:
            connection = await self._pool.connect()
        except ConnectError as error:
            self._fail(request, error)
            return
        if request is None:
            self._give(connection)
        elif request.end_ns:
            self._pool.keep(connection)
        else:
            request.begin(connection)

    def _give(self, connection: ServerConnection) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            if not request.end_ns:
                request.begin(connection)
                return
        self._pool.keep(connection)

    def _fail(self, request: RequestRun | None, error: ConnectError) -> None:
        """End this request with the error, or the first waiting one."""
        while request is None or request.end_ns:
            if not self._waiting:
                return
            request = self._waiting.popleft()
        request.give_up("timeout" if error.kind == "connect_timeout" else "error", error.kind)


STARTS_PER_TURN = 16
"""Most requests started before the loop may read again."""
BEAT_NS = 50_000_000
"""Between two samples of the loop's delay, each with a look for requests that take too long."""
BEATS_PER_PULSE = 5

Message = Batch | Pulse | Halted


class Sender:
    """Orders in, requests in between, ends out. All methods return at once."""

    def __init__(
        self,
        start: Start,
        deliver: Callable[[Message], None],
        *,
        start_anew: Start,
        on_free: Callable[[], None] = lambda: None,
        parallel: int | None = None,
        timeout_ns: int | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``start`` begins a request, ``start_anew`` retries after a stale connection; ``on_free``: one may be free."""
        self._start_request, self._start_anew, self._on_free = start, start_anew, on_free
        self._deliver = deliver
        self._parallel = parallel
        self._timeout_ns = timeout_ns
        self._clock = clock
        self._upcoming: list[tuple[int, int, Order]] = []
        self._held: deque[Order] = deque()
        self._in_flight: dict[int, RequestRun] = {}  # in order of their start, so that the first is the oldest
        self._started = 0
        self._ended: list[Ended] = []
        self._ended_bytes = 0
        self._expired: list[int] = []
        self._alarm = Alarm(self._advance, clock)
        self._beat = Alarm(self._on_beat, clock)
        self._next_beat_ns = clock() + BEAT_NS
        self._beat.set(self._next_beat_ns)
        self._beats = 0
        self._delays_ns: list[int] = []
        self._cpu_before_ns = time.process_time_ns()

    def take(self, orders: Sequence[Order]) -> None:
        for order in orders:
            heapq.heappush(self._upcoming, (order.at_ns, order.number, order))
        self._advance()

    def halt(self, kind: LossKind | None = None) -> None:
        """``kind``: error of the requests that are in flight."""
        unsent = sum(not order.fills for order in self._held)
        self._upcoming.clear()
        self._held.clear()
        for request in list(self._in_flight.values()):
            request.give_up("client_abort", kind)
        self._hand_over()
        self._deliver(self._pulse())
        self._deliver(Halted(unsent))

    def close(self) -> None:
        self._alarm.close()
        self._beat.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is idle while an order waits for one, or there are too many in flight."""
        assert self._parallel is None or len(self._in_flight) <= self._parallel
        assert not self._held or len(self._in_flight) == self._parallel
        assert not any(request.end_ns for request in self._in_flight.values())

    def _advance(self) -> None:
        upcoming, now_ns = self._upcoming, self._clock()
        for _ in range(STARTS_PER_TURN):
            if not upcoming or upcoming[0][0] > now_ns:
                break
            order = heapq.heappop(upcoming)[2]
            if self._parallel is not None and len(self._in_flight) >= self._parallel:
                self._held.append(order)
            else:
                self._start(order, now_ns)
        self._alarm.set(upcoming[0][0] if upcoming else None)

    def _start(self, order: Order, now_ns: int, *, held: bool = False) -> None:
        if order.until_ns is not None and now_ns > order.until_ns:
            self._expire(order)
            return
        self._started += 1
        request = RequestRun(
            order,
            self,
            scheduled_ns=now_ns if order.fills else order.at_ns,
            started_ns=now_ns,
            concurrency=len(self._in_flight) + 1,
            held=held and not order.fills,
        )
        self._in_flight[order.number] = request
        self._start_request(request)

    def ended(self, request: RequestRun) -> None:
        """Give the slot of an ended request to a held order, and its connection to a waiting request."""
        del self._in_flight[request.number]
        self._will_hand_over()
        self._ended.append(request.summary())
        self._ended_bytes += request.kept_bytes
        if self._ended_bytes > BATCH_BYTES:
            self._hand_over()
        while self._held and (self._parallel is None or len(self._in_flight) < self._parallel):
            self._start(self._held.popleft(), self._clock(), held=True)
        self._on_free()

    def stale(self, request: RequestRun) -> None:
        self._start_anew(request)

    def _expire(self, order: Order) -> None:
        self._started += 1
        self._will_hand_over()
        self._expired.append(order.number)

    def _will_hand_over(self) -> None:
        if not self._ended and not self._expired:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if self._ended or self._expired:
            self._deliver(Batch(self._ended, self._expired, self._started, len(self._in_flight)))
            self._ended, self._ended_bytes, self._expired = [], 0, []

    def _on_beat(self) -> None:
        now_ns = self._clock()
        self._delays_ns.append(now_ns - self._next_beat_ns)
        self._next_beat_ns = max(self._next_beat_ns, now_ns - BEAT_NS) + BEAT_NS
        self._beat.set(self._next_beat_ns)
        self._give_up_the_late(now_ns)
        self._give_up_the_largest()
        self._beats += 1
        if self._beats % BEATS_PER_PULSE == 0:
            self._deliver(self._pulse())

    def _give_up_the_late(self, now_ns: int) -> None:
        if self._timeout_ns is None:
            return
        started_by_ns = now_ns - self._timeout_ns
        for request in list(
            itertools.takewhile(lambda request: request.started_ns <= started_by_ns, self._in_flight.values())
        ):
            request.give_up("timeout", "timeout")

    def _give_up_the_largest(self) -> None:
        kept = sum(request.kept_bytes for request in self._in_flight.values())
        if kept <= MOST_KEPT_BYTES:
            return
        for request in sorted(self._in_flight.values(), key=lambda request: -request.kept_bytes):
            if kept <= MOST_KEPT_BYTES:
                break
            kept -= request.kept_bytes
            request.give_up_overlong()

    def _pulse(self) -> Pulse:
        first_reads_ns: list[int] = []
        gaps_ns: list[int] = []
        for request in self._in_flight.values():
            reads, told = request.reads, request.told_reads
            if len(reads) == told:
                continue
            if not request.whole:
                if told == 0:
                    first_reads_ns.append(reads[0][0] - request.sent_ns)
                new = reads[max(0, told - 1) :]
                gaps_ns += [later[0] - earlier[0] for earlier, later in itertools.pairwise(new)]
            request.told_reads = len(reads)
        delays_ns, self._delays_ns = self._delays_ns, []
        cpu_ns = time.process_time_ns() - self._cpu_before_ns
        return Pulse(self._started, len(self._in_flight), cpu_ns, delays_ns, first_reads_ns, gaps_ns)


class SenderProcess:
    """A sender at the end of its shard's socket: setup, orders, halt, and the end when the shard closes it."""

    def __init__(self) -> None:
        self._over = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._link: FrameSocket | None = None
        self._sender: Sender | None = None
        self._connections: Connections | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Serve until the shard closes its end. Raises the error of a callback, because its request would never end."""
        asyncio.get_running_loop().set_exception_handler(self._on_failure)
        self._link = await FrameSocket(self._on_frame, self._on_end).attach(sock)
        await self._over
        if self._sender is not None:
            self._sender.close()
        if self._connections is not None:
            self._connections.close()
        await asyncio.sleep(0)  # lets the transports see it

    def _on_frame(self, payload: bytes) -> None:
        message = to_sender.decode(payload)
        if isinstance(message, SenderSetup):
            task = asyncio.get_running_loop().create_task(self._set_up(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self._sender is None:
            raise AssertionError("orders before the connections were open")
        elif isinstance(message, Orders):
            self._sender.take(message.orders)
        elif isinstance(message, Halt):
            self._sender.halt(message.kind)

    async def _set_up(self, setup: SenderSetup) -> None:
        pool = ConnectionPool(parse_url(setup.url), tls=setup.tls)
        self._connections = connections = Connections(pool, setup.parallel)
        try:
            await pool.warm(setup.warm)
        except ConnectError as error:
            self._send(Unreachable(error.reason))
            return
        self._sender = Sender(
            connections.start,
            self._send,
            start_anew=connections.start_anew,
            on_free=connections.serve,
            parallel=setup.parallel,
            timeout_ns=setup.timeout_ns,
        )
        # Collecting garbage stops the clock for tens of ms; reference counts free what a request leaves.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._send(Connected())

    def _send(self, message: Message | Connected | Unreachable) -> None:
        assert self._link is not None
        self._link.send(encode(message))

    def _on_end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError) and not self._over.done():
            self._over.set_exception(error)


async def _serve(sock: socket.socket) -> None:
    await SenderProcess().serve(sock)


def main(argv: Sequence[str]) -> int:
    """``python -m loadgen.sending.sender FD``: started by a shard, with its end of a socket pair."""
    try:
        run(_serve(parent_socket(argv)))
    except Exception as error:  # its message could quote a request
        print(f"loadgen: a sender process failed ({failure_words(error)})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
