"""Run of a plan: requests are built ahead and sent on schedule; responses are parsed, followed up and recorded.

All work is on one event loop. Deferrable work (building prompts, parsing, writing records) is done in short pieces;
between them the loop reads: a read behind a piece gets a late time stamp, which distorts TTFT and ITL.
"""

import asyncio
import heapq
import time
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from loadgen.core.job import Plan, Send
from loadgen.core.request import RequestWriter
from loadgen.sending.exchange import Exchange, Order
from loadgen.sending.records import reason_of, response_of
from loadgen.sending.sender import Connections, Sender
from measure.live_counts import LiveCounts
from tracefile.records.schema import Record
from wire.alarm import Alarm, Clock

BUILD_AHEAD_NS = 50_000_000
"""Time from building to sending: late enough that most parents of a replay have ended."""
MOST_WAITING = 256
MOST_WAITING_BYTES = 16 << 20
"""Limits of requests that are built and not started."""
PIECE_NS = 300_000
"""Maximum time of building or processing before the loop may read again."""
BLOCKED_NS = 5_000_000
"""Pause of building at these limits: fewer requests become due in it."""
LARGE_BODY_BYTES = 16 << 10


class PlanRun:
    """Run of a plan. ``over`` is done when everything has ended, or holds the error that ended it."""

    def __init__(
        self,
        plan: Plan,
        connections: Connections,
        writer: RequestWriter,
        write: Callable[[Record], None],
        *,
        t0_ns: int,
        ends_ns: int | None = None,
        parallel: int | None = None,
        timeout_s: float | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``ends_ns``: remaining requests are cancelled then; null: they finish."""
        self._roots = iter(plan)
        self._writer, self._write, self._clock = writer, write, clock
        self._t0_ns, self._ends_ns = t0_ns, ends_ns
        self._planned = 0
        self._upcoming: list[Order] = []
        """Requests to build."""
        self._ended: deque[Exchange] = deque()
        self._turning = False
        self._sender = Sender(
            connections,
            self._on_ended,
            self._on_expired,
            parallel=parallel,
            timeout_ns=None if timeout_s is None else round(timeout_s * 1e9),
            clock=clock,
        )
        self._alarm = Alarm(self._turn, clock)
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.stopped: str | None = None
        """Null: not interrupted."""
        self.last_end_ns = t0_ns
        self.reason = ""
        """Error message of the first refused request: for the terminal only, because it may quote the request."""
        self.tally = LiveCounts()
        self.follow_up_delay_ms = array("d")
        """Delay from a response's end until its follow-up is planned."""
        self._next_root()

    @property
    def loop_delay_ms(self) -> "array[float]":
        return self._sender.delays_ms

    def start(self) -> None:
        self._turn()

    def stop(self, reason: str) -> None:
        """Send nothing more, and abort the requests in flight."""
        if self.stopped is None:
            self.stopped = reason
            self._roots = iter(())
            self._upcoming.clear()
            self._sender.halt()
            self._turn_soon()

    def fail(self, error: Exception) -> None:
        self.stopped = self.stopped or "failed"
        if not self.over.done():
            self.over.set_exception(error)

    def close(self) -> None:
        self._alarm.close()
        self._sender.close()

    def count(self) -> LiveCounts:
        """Return the counts of requests, tokens and latencies so far."""
        self.tally.started, self.tally.in_flight = self._sender.started, self._sender.in_flight + len(self._ended)
        return self.tally

    def check_integrity(self) -> None:
        self._sender.check_integrity()
        self.count().check_integrity()

    def _on_ended(self, exchange: Exchange) -> None:
        self._ended.append(exchange)
        self._turn_soon()

    def _on_expired(self, order: Order) -> None:
        """Drop all later roots after an expired root without a due time."""
        if order.send.due_ms is None:
            self._roots = iter(())
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Build requests, process ended exchanges, and continue while there is work."""
        self._turning = False
        if self.over.done():
            return
        try:
            num_built = self._build()
            self._process_ended()
        except Exception as error:  # otherwise a callback's exception would block the run forever
            self.fail(error)
            return
        if self._ended or num_built:
            self._turn_soon()
        else:
            blocked = bool(self._upcoming) and self._sender.upcoming
            self._alarm.set(self._clock() + BLOCKED_NS if (wake_ns := self._wake_ns()) is None and blocked else wake_ns)
            self._check_over()

    def _wake_ns(self) -> int | None:
        """Time to build the next request; null: none, or started requests and ended exchanges come first."""
        sender = self._sender
        unfinished = sender.waiting + len(self._ended)
        if not self._upcoming or unfinished >= MOST_WAITING or sender.waiting_bytes >= MOST_WAITING_BYTES:
            return None
        return self._upcoming[0].at_ns - BUILD_AHEAD_NS

    def _build(self) -> int:
        """Build requests and pass them to the sender, for a short time; return their number."""
        num_built, began_ns = 0, self._clock()
        while (wake_ns := self._wake_ns()) is not None and wake_ns <= began_ns:
            order = heapq.heappop(self._upcoming)
            if order.parent_end_ms is None:
                self._next_root()
            request = order.send.build()
            order.data, order.most_bytes = self._writer.write(request), request.most_response_bytes()
            large = len(order.data) > LARGE_BODY_BYTES  # stored once
            order.request = msgspec.structs.replace(request, body=b"") if large else request
            self._sender.enqueue(order)
            num_built += 1
            if self._clock() - began_ns > PIECE_NS:
                break
        return num_built

    def _process_ended(self) -> None:
        began_ns = self._clock()
        while self._ended:
            self._process(self._ended.popleft())
            if self._clock() - began_ns > PIECE_NS:
                break

    def _process(self, exchange: Exchange) -> None:
        """Parse the response, plan the follow-ups, write the record."""
        order = exchange.order
        response = response_of(exchange, self._t0_ns)
        if self.stopped is None:
            follow_ups = order.send.then(response)
            for follow_up in follow_ups:
                self._add(follow_up, exchange.end_ns, response.end_ms)
            if follow_ups:
                self.follow_up_delay_ms.append((self._clock() - exchange.end_ns) / 1e6)
                self._build()
        record = order.send.describe(response)
        self.reason = self.reason or reason_of(exchange)
        self._write(record)
        self.tally.finish(record)
        self.last_end_ns = max(self.last_end_ns, exchange.end_ns)

    def _next_root(self) -> None:
        root = next(self._roots, None)
        if root is not None:
            self._add(root, self._t0_ns, None)

    def _add(self, send: Send, from_ns: int, parent_end_ms: float | None) -> None:
        self._planned += 1
        at_ns = from_ns + round((send.due_ms or 0.0) * 1e6)
        until_ns = None if send.until_ms is None else self._t0_ns + round(send.until_ms * 1e6)
        heapq.heappush(self._upcoming, Order(at_ns, self._planned, send, parent_end_ms, until_ns))

    def _check_over(self) -> None:
        left = self._upcoming or self._ended or self._sender.waiting or self._sender.in_flight
        if not left and not self.over.done():
            self.over.set_result(None)
