"""The one sender: requests at their absolute due times, answers back to the plan, records as they finish.

Between a due time and its first byte lie one heap pop and one task: bodies are built up to ``BUILD_AHEAD_MS`` before,
answers are parsed, hashed and recorded after, one at a time between the loop's other work.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from loadgen.pacing import Alarm, Clock
from loadgen.plan import Plan, Send
from loadgen.recording import Sent, answer_of
from loadgen.request import PlannedRequest
from loadgen.tally import Tally
from tracefile import Record
from wire.client import Exchange

BUILD_AHEAD_MS = 20.0
"""How long before its time a request is built: late enough that a replay's parents have mostly answered."""

STARTS_PER_WAKE = 16
"""Most requests started before the loop may read again."""

REFUSALS_TO_STOP = 3
"""A run whose first requests are all refused as malformed is a mistake, not a measurement."""

NS_PER_MS = 1_000_000

Transmit = Callable[[PlannedRequest], Awaitable[Exchange]]
"""Sends a request and gives its exchange, whatever came of it; cancelled, it gives what had come by then."""


@dataclass(slots=True, order=True)
class Due:
    """A send with its absolute time; ordered by time, then by the order it was planned in."""

    at_ns: int
    order: int
    send: Send = field(compare=False)
    parent_end_ms: float | None = field(compare=False, default=None)
    request: PlannedRequest | None = field(compare=False, default=None)
    """Null: not built yet."""
    held: bool = field(compare=False, default=False)
    """Whether it had to wait for a slot."""


class Sender:
    """One run of one plan. ``run`` returns when everything has ended or ``stop`` was called."""

    def __init__(
        self,
        plan: Plan,
        transmit: Transmit,
        write: Callable[[Record], None],
        tally: Tally,
        *,
        t0_ns: int,
        parallel: int | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._roots = iter(plan)
        self._transmit = transmit
        self._write = write
        self._tally = tally
        self._t0_ns = t0_ns
        self._parallel = parallel
        self._clock = clock
        self._planned = 0
        self._upcoming: list[Due] = []
        self._built: list[Due] = []
        self._held: deque[Due] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: deque[Sent] = deque()
        self._alarm = Alarm(self._wake, clock)
        self._over = asyncio.get_running_loop().create_future()
        self.stopped: str | None = None
        """Why the run was cut short; null: it was not."""

    async def run(self) -> None:
        """Send the plan to its end."""
        self._plan_root()
        self._wake()
        await self._over

    def stop(self, reason: str) -> None:
        """Send nothing more; what is in flight is aborted and recorded."""
        if self.stopped is not None:
            return
        self.stopped = reason
        self._roots = iter(())
        self._upcoming.clear()
        self._built.clear()
        self._held.clear()
        # Not at once: a task cancelled before its first step would never end its request.
        asyncio.get_running_loop().call_soon(self._abort_all)

    def _abort_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._wake()

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is counted in flight is, and no slot is idle while a request waits."""
        assert self._tally.in_flight == len(self._tasks)
        assert not self._held or self._tally.in_flight == self._parallel
        assert all(due.request is not None for due in self._built)
        assert all(due.request is None for due in self._upcoming)

    def _wake(self) -> None:
        try:
            self._advance()
        except Exception as error:  # a callback's exception would leave the run waiting for ever
            self._fail(error)

    def _advance(self) -> None:
        """Start what is due, build what soon will be, and set the alarm for the next of either."""
        started = 0
        while started < STARTS_PER_WAKE:
            now_ns = self._clock()
            if self._built and self._built[0].at_ns <= now_ns:
                self._start(heapq.heappop(self._built))
                started += 1
            elif self._upcoming and self._build_at_ns() <= now_ns:
                self._build(heapq.heappop(self._upcoming))
            else:
                break
        self._alarm.set(self._next_wake_ns())
        self._check_over()

    def _next_wake_ns(self) -> int | None:
        times = [self._built[0].at_ns] if self._built else []
        if self._upcoming:
            times.append(self._build_at_ns())
        return min(times, default=None)

    def _build_at_ns(self) -> int:
        return self._upcoming[0].at_ns - int(BUILD_AHEAD_MS * NS_PER_MS)

    def _plan_root(self) -> None:
        """Keep one root ahead: a plan may be endless."""
        root = next(self._roots, None)
        if root is not None:
            self._plan(root, self._t0_ns, None)

    def _plan(self, send: Send, from_ns: int, parent_end_ms: float | None) -> None:
        self._planned += 1
        at_ns = from_ns + round((send.due_ms or 0.0) * NS_PER_MS)
        heapq.heappush(self._upcoming, Due(at_ns, self._planned, send, parent_end_ms))

    def _build(self, due: Due) -> None:
        due.request = due.send.build()
        heapq.heappush(self._built, due)
        if due.parent_end_ms is None:
            self._plan_root()

    def _start(self, due: Due) -> None:
        if self._parallel is not None and self._tally.in_flight >= self._parallel:
            due.held = True
            self._held.append(due)
            return
        self._tally.start()
        task = asyncio.get_running_loop().create_task(self._send(due, self._tally.in_flight))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def _send(self, due: Due, concurrency: int) -> None:
        """One request on the wire; what its end brings about is settled between the loop's other work."""
        request = due.request
        assert request is not None  # built before it is started
        exchange = await self._transmit(request)
        this = asyncio.current_task()
        assert this is not None
        self._tasks.discard(this)
        self._tally.in_flight -= 1
        self._ended.append(
            Sent(
                request=request,
                exchange=exchange,
                scheduled_ms=(due.at_ns - self._t0_ns) / NS_PER_MS,
                parent_end_ms=due.parent_end_ms,
                concurrency=concurrency,
                held=due.held,
                send=due.send,
            )
        )
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._settle)
        if self._held:
            self._start(self._held.popleft())

    def _settle(self) -> None:
        try:
            self._settle_one(self._ended[0])
        except Exception as error:  # as in _wake
            self._fail(error)
            return
        self._ended.popleft()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._settle)
        self._wake()

    def _settle_one(self, sent: Sent) -> None:
        """One ended request: its answer read, its follow-ups planned, its record written."""
        answer = answer_of(sent, self._t0_ns)
        for follow_up in sent.send.then(answer) if self.stopped is None else ():
            self._plan(follow_up, sent.exchange.end_ns, answer.end_ms)
        record = sent.send.describe(answer)
        self._write(record)
        self._tally.finish(record, held=sent.held)
        if self._tally.only_refusals(REFUSALS_TO_STOP):
            self.stop("refused")

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the run with an error that is no request's."""
        self.stop("failed")
        if not self._over.done():
            self._over.set_exception(error)

    def _check_over(self) -> None:
        busy = self._upcoming or self._built or self._held or self._tally.in_flight or self._ended
        if not busy and not self._over.done():
            self._over.set_result(None)
