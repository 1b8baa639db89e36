"""Built requests are written at their absolute times: from due time to first byte only a heap pop and a write."""

import asyncio
import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable

from loadgen.sending.exchange import Exchange, Order
from wire.alarm import Alarm, Clock
from wire.client.connection import ServerConnection
from wire.client.pool import ConnectError, ConnectionPool

SPARE = 4
"""Idle connections kept open beyond those in use."""
STARTS_PER_TURN = 16
"""Maximum requests started before the loop may read again."""
BEAT_NS = 50_000_000
"""Interval of event-loop delay samples, each with a check for timeouts."""


class Connections:
    """Assigns connections to exchanges; without a free connection, exchanges wait in order for the next."""

    def __init__(self, pool: ConnectionPool, limit: int | None) -> None:
        """``limit``: maximum connections, equal to the limit of requests in flight; null: no limit."""
        self._pool = pool
        self._limit = limit
        self._waiting: deque[Exchange] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    async def warm(self, count: int) -> None:
        """Open ``count`` connections. Raises ConnectError."""
        await self._pool.warm(count)

    def start(self, exchange: Exchange) -> None:
        connection = self._pool.pop_idle()
        if connection is None:
            self._waiting.append(exchange)
            self._open()
            return
        exchange.begin(connection)
        if self._pool.num_idle < SPARE and len(self._opening) < SPARE and self._may_open():
            self._open()

    def start_anew(self, exchange: Exchange) -> None:
        """Retry on a new connection: the server had closed the first."""
        self._open(exchange)

    def serve(self) -> None:
        """Assign free connections to waiting exchanges."""
        while self._waiting:
            if self._waiting[0].end_ns:
                self._waiting.popleft()
                continue
            connection = self._pool.pop_idle()
            if connection is None:
                return
            self._waiting.popleft().begin(connection)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        self._pool.close()

    def _may_open(self) -> bool:
        return self._limit is None or self._pool.num_open + len(self._opening) < self._limit

    def _open(self, exchange: Exchange | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, exchange: Exchange | None) -> None:
        """Open a connection for this exchange, or for the first in the queue."""
        try:
            connection = await self._pool.connect()
        except ConnectError as error:
            self._fail(exchange, error)
            return
        if exchange is not None and not exchange.end_ns:
            exchange.begin(connection)
        else:
            self._give(connection)

    def _give(self, connection: ServerConnection) -> None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.end_ns:
                exchange.begin(connection)
                return
        self._pool.keep(connection)

    def _fail(self, exchange: Exchange | None, error: ConnectError) -> None:
        """End this exchange with the error, or the first in the queue."""
        while exchange is None or exchange.end_ns:
            if not self._waiting:
                return
            exchange = self._waiting.popleft()
        exchange.give_up("timeout" if error.kind == "connect_timeout" else "error", error.kind)


class Sender:
    """Starts orders on schedule, within the limits of requests in flight and latency. All methods return at once."""

    def __init__(
        self,
        connections: Connections,
        ended: Callable[[Exchange], None],
        expired: Callable[[Order], None],
        *,
        parallel: int | None = None,
        timeout_ns: int | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``expired`` gets orders that were too late to start; ``timeout_ns``: from a start to the last byte."""
        self._connections = connections
        self._on_ended, self._on_expired = ended, expired
        self._parallel, self._timeout_ns = parallel, timeout_ns
        self._clock = clock
        self._upcoming: list[Order] = []
        self._waiting_for_slot: deque[Order] = deque()
        self._in_flight: dict[int, Exchange] = {}  # in order of their start, so that the first is the oldest
        self.started = 0
        self.waiting_bytes = 0
        self.delays_ms = array("d")
        """Event-loop delay in ms, sampled 20 times a second: error of read time stamps."""
        self._alarm = Alarm(self._advance, clock)
        self._beat = Alarm(self._on_beat, clock)
        self._next_beat_ns = clock() + BEAT_NS
        self._beat.set(self._next_beat_ns)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def upcoming(self) -> bool:
        """True if an order waits for its due time."""
        return bool(self._upcoming)

    @property
    def waiting(self) -> int:
        """Orders that have not started."""
        return len(self._upcoming) + len(self._waiting_for_slot)

    def enqueue(self, order: Order) -> None:
        self.waiting_bytes += len(order.data)
        heapq.heappush(self._upcoming, order)
        self._advance()

    def halt(self) -> None:
        """Start nothing more; abort the requests in flight."""
        self._upcoming.clear()
        self._waiting_for_slot.clear()
        self.waiting_bytes = 0
        for exchange in list(self._in_flight.values()):
            exchange.give_up("client_abort", None)

    def close(self) -> None:
        self._alarm.close()
        self._beat.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is idle while an order waits for it, or there are too many in flight."""
        assert self._parallel is None or len(self._in_flight) <= self._parallel
        assert not self._waiting_for_slot or len(self._in_flight) == self._parallel
        assert not any(exchange.end_ns for exchange in self._in_flight.values())
        assert self.waiting_bytes == sum(len(order.data) for order in (*self._upcoming, *self._waiting_for_slot))

    def _advance(self) -> None:
        upcoming, now_ns = self._upcoming, self._clock()
        for _ in range(STARTS_PER_TURN):
            if not upcoming or upcoming[0].at_ns > now_ns:
                break
            order = heapq.heappop(upcoming)
            if self._parallel is not None and len(self._in_flight) >= self._parallel:
                self._waiting_for_slot.append(order)
            else:
                self._start(order, now_ns)
        self._alarm.set(upcoming[0].at_ns if upcoming else None)

    def _start(self, order: Order, now_ns: int, *, held: bool = False) -> None:
        self.waiting_bytes -= len(order.data)
        if order.until_ns is not None and now_ns > order.until_ns:
            self._on_expired(order)
            return
        self.started += 1
        concurrency, held = len(self._in_flight) + 1, held and not order.fills
        exchange = Exchange(
            order, self.ended, self._connections.start_anew, started_ns=now_ns, concurrency=concurrency, held=held
        )
        self._in_flight[order.number] = exchange
        self._connections.start(exchange)

    def ended(self, exchange: Exchange) -> None:
        """Give the slot of an ended exchange to the next queued order, and its connection to a waiting exchange."""
        del self._in_flight[exchange.order.number]
        self._on_ended(exchange)
        while self._waiting_for_slot and (self._parallel is None or len(self._in_flight) < self._parallel):
            self._start(self._waiting_for_slot.popleft(), self._clock(), held=True)
        self._connections.serve()

    def _on_beat(self) -> None:
        now_ns = self._clock()
        self.delays_ms.append((now_ns - self._next_beat_ns) / 1e6)
        self._next_beat_ns = max(self._next_beat_ns, now_ns - BEAT_NS) + BEAT_NS
        self._beat.set(self._next_beat_ns)
        if self._timeout_ns is None:
            return
        deadline_ns = now_ns - self._timeout_ns
        oldest = itertools.takewhile(lambda exchange: exchange.started_ns <= deadline_ns, self._in_flight.values())
        for exchange in list(oldest):
            exchange.give_up("timeout", "timeout")
