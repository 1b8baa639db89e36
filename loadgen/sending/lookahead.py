"""Requests of a plan that are due to be built: ahead of need, within bounds of memory."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from loadgen.core.plan import Plan, Send

BUILD_AHEAD_MS = 50.0
"""Time from building to sending: late enough that most parents of a replay have ended."""
MOST_WAITING = 256
MOST_WAITING_BYTES = 16 << 20

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Clocks:
    """A shard's moments on ``perf_counter_ns``."""

    t0_ns: int
    zero_ns: int
    """The trace's zero: ``t0_ns``, unless the run continues an earlier one."""

    def plan_ms(self, at_ns: int) -> float:
        return (at_ns - self.t0_ns) / NS_PER_MS

    def trace_ms(self, at_ns: int) -> float:
        return (at_ns - self.zero_ns) / NS_PER_MS


@dataclass(slots=True, order=True)
class Planned:
    """A send with its absolute time; ordered by time, then by the order it was planned in."""

    at_ns: int
    number: int
    send: Send = field(compare=False)
    parent_end_ms: float | None = field(compare=False)
    """End of the request that it follows, on the trace's clock; null: a root."""
    held: bool = field(compare=False, default=False)
    """True if it was due before the request that it follows ended."""


class Lookahead:
    """A plan's sends by time. ``pop`` gives what is to be built now; ``wake_ns`` says when to ask again."""

    def __init__(self, plan: Plan, t0_ns: int, not_before_ns: int) -> None:
        """``not_before_ns``: earliest due time, in a resumed run."""
        self._roots = iter(plan)
        self._t0_ns, self._not_before_ns = t0_ns, not_before_ns
        self._numbered = 0
        self._upcoming: list[Planned] = []
        self._waiting: deque[int] = deque()  # sizes of what is built and not started, in order
        self._waiting_bytes = 0
        self._given = 0
        self._next_root()

    def __bool__(self) -> bool:
        return bool(self._upcoming)

    def follow(self, send: Send, end_ns: int, parent_end_ms: float) -> None:
        self._add(send, self._t0_ns if send.from_start else end_ns, parent_end_ms, end_ns)

    def pop(self, now_ns: int) -> Planned | None:
        """Return the next request to build; null: too early, or no room."""
        wake_ns = self.wake_ns()
        if wake_ns is None or wake_ns > now_ns:
            return None
        planned = heapq.heappop(self._upcoming)
        if planned.parent_end_ms is None:
            self._next_root()
        return planned

    def wake_ns(self) -> int | None:
        """Time to build the next request; null: none, or a built one must start first."""
        if not self._upcoming or len(self._waiting) >= MOST_WAITING or self._waiting_bytes >= MOST_WAITING_BYTES:
            return None
        return self._upcoming[0].at_ns - int(BUILD_AHEAD_MS * NS_PER_MS)

    def gave(self, size: int) -> None:
        """Count a request of ``size`` bytes that was built and handed on."""
        self._given += 1
        self._waiting.append(size)
        self._waiting_bytes += size

    def started(self, count: int) -> None:
        """``count`` of all requests handed on have started, nearly in order of time."""
        while self._waiting and self._given - len(self._waiting) < count:
            self._waiting_bytes -= self._waiting.popleft()

    def clear(self) -> None:
        self._roots = iter(())
        self._upcoming.clear()

    def no_more_roots(self) -> None:
        """Take no further roots from the plan: a root without a time of its own was too late."""
        self._roots = iter(())

    def _next_root(self) -> None:
        root = next(self._roots, None)
        if root is not None:
            self._add(root, self._t0_ns, None)

    def _add(self, send: Send, from_ns: int, parent_end_ms: float | None, end_ns: int = 0) -> None:
        self._numbered += 1
        at_ns = max(from_ns + round((send.due_ms or 0.0) * NS_PER_MS), self._not_before_ns)
        heapq.heappush(self._upcoming, Planned(at_ns, self._numbered, send, parent_end_ms, at_ns < end_ns))
