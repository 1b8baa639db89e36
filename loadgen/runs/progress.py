"""Progress of a run: counts, throughput and latencies at one moment, from the reports of its workers."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.runs.messages import Done, Failed, Progress
from measure.live_counts import Counts, Recent, Sample

WINDOW_S = 10.0

Quantiles = tuple[float, float] | None
"""p50 and p99 in ms. Null: no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a run. Counts: since its start. Throughput and latency quantiles: last 10 s, over all workers."""

    elapsed_s: float
    remaining_s: float | None
    """Seconds to the end, by the plan's last send and the mean rate of the run; null: unknown."""
    stopping: str | None
    planned: int | None
    counts: Counts
    rate: float
    output_tokens_per_s: float
    ttft: Quantiles
    itl: Quantiles
    lag: Quantiles

    @property
    def hit_rate(self) -> float | None:
        """Prefix hit rate: cached over prompt tokens, where reported; null: never."""
        counts = self.counts
        return counts.cached_tokens / counts.looked_up_tokens if counts.looked_up_tokens else None


class RecentWindow:
    """Latency samples of the last ``WINDOW_S``, in memory that does not grow with the load."""

    def __init__(self) -> None:
        self.total = Recent()
        self._parts: deque[tuple[float, Recent]] = deque()

    def add(self, at_s: float, recent: Recent) -> None:
        recent.fold()
        self.total.merge(recent)
        self._parts.append((at_s, recent))
        self.forget(at_s)

    def forget(self, now_s: float) -> None:
        while self._parts and self._parts[0][0] < now_s - WINDOW_S:
            self.total.subtract(self._parts.popleft()[1])


class RateWindow:
    """Rate of a count (requests, output tokens) over the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, at_s: float, count: int) -> float:
        """Return the rate a second; 0 before two points in time."""
        self._points.append((at_s, count))
        while len(self._points) > 2 and self._points[1][0] <= at_s - WINDOW_S:
            self._points.popleft()
        (from_s, before), (to_s, after) = self._points[0], self._points[-1]
        return (after - before) / (to_s - from_s) if to_s > from_s else 0.0


class RunProgress:
    """Progress reports of all workers."""

    def __init__(
        self,
        zero_ns: int,
        workers: int,
        *,
        planned: int | None,
        last_send_s: float | None = None,
        stopping: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``zero_ns``: t = 0 on ``perf_counter_ns``."""
        self._zero_ns, self._stopping = zero_ns, stopping
        self._planned, self._last_send_s = planned, last_send_s
        self._counts = [Counts() for _ in range(workers)]
        self._recent = RecentWindow()
        self._sent, self._tokens = RateWindow(), RateWindow()

    def receive(self, worker: int, message: Progress | Done | Failed) -> None:
        now_s = self.elapsed_s()
        if isinstance(message, Progress):
            self._counts[worker] = message.counts
            self._recent.add(now_s, message.recent)
        elif isinstance(message, Done):
            self._counts[worker] = message.tally.counts()
            self._recent.add(now_s, message.tally.pop_recent())

    def elapsed_s(self) -> float:
        return max(0.0, (time.perf_counter_ns() - self._zero_ns) / 1e9)

    def status(self) -> Status:
        now_s, counts = self.elapsed_s(), Counts()
        for counts_of_worker in self._counts:
            counts.add_counts(counts_of_worker)
        self._recent.forget(now_s)
        ttft, itl, lag = map(_p50_p99, self._recent.total.samples)
        return Status(
            elapsed_s=now_s,
            remaining_s=remaining_s(
                now_s, counts.started, counts.ended, planned=self._planned, last_send_s=self._last_send_s
            ),
            stopping=self._stopping(),
            planned=self._planned,
            counts=counts,
            rate=self._sent.add(now_s, counts.started),
            output_tokens_per_s=self._tokens.add(now_s, counts.output_tokens),
            ttft=ttft,
            itl=itl,
            lag=lag,
        )

    def reports_cached(self) -> bool | None:
        """Return True if a completed request had cached tokens; null: none has completed."""
        if any(counts.cached_reported for counts in self._counts):
            return True
        return False if any(counts.statuses["ok"] for counts in self._counts) else None

    def only_refusals(self) -> bool:
        return all(counts.only_refusals for counts in self._counts)


def remaining_s(
    now_s: float, started: int, ended: int, *, planned: int | None, last_send_s: float | None
) -> float | None:
    """Return seconds to the end; null: unknown.

    Unsent requests take until the planned last send. The rest take the mean rate of the run, which is steadier than
    that of the last seconds. While few have ended, half of the started requests count as ended.
    """
    to_send_s = 0.0 if last_send_s is None else max(last_send_s - now_s, 0.0)
    left = started - ended if planned is None or to_send_s else planned - ended
    pace = max(ended, started / 2) / max(now_s, 1e-3)
    if last_send_s is None and (planned is None or not pace):
        return None
    return round(to_send_s + (max(left, 0) / pace if pace else 0.0), 1)


def _p50_p99(sample: Sample) -> Quantiles:
    if not sample.count:
        return None
    p50, p99 = sample.quantiles(0.5, 0.99)
    return p50, p99
