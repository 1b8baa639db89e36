"""Progress of a run: the status for the live view, log lines and ``--json-progress``."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from loadgen.runs.shardmessages import Done, Failed, Progress
from loadgen.runs.shards import Zero
from measure.tally import Counts, Recent, Sample

WINDOW_S = 10.0
SILENT_S = 2.0
"""Shards report four times a second; a longer silence is shown."""

TargetRate = Callable[[float], float | None]
"""Planned requests a second at a second of the run; null: as responses allow."""


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Last reported state of a shard."""

    where: str
    sent: int
    in_flight: int
    errors: int
    silent_s: float | None
    """Seconds since its last report; null: below ``SILENT_S``, or done."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Counts are from its start; rates and quantiles are of the last 10 s, over all shards."""

    elapsed_s: float
    remaining_s: float | None
    """To the end, by the plan's last send and the pace of the whole run; null: unknown."""
    stopping: str | None
    planned: int | None
    sent: int
    in_flight: int
    done: int
    errors: int
    queued: int
    target_rate: float | None
    """Planned requests a second; null: unknown, or as responses come."""
    rate: float
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    """Null, here and below: no sample."""
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    hit_rate: float | None
    """Cached over prompt tokens, where reported; null: never."""
    shards: list[ShardStatus]


class RecentWindow:
    """Samples of the last ``WINDOW_S``, in memory that does not grow with the load."""

    def __init__(self) -> None:
        self.whole = Recent()
        self._parts: deque[tuple[float, Recent]] = deque()

    def add(self, at_s: float, recent: Recent) -> None:
        recent.fold()
        self.whole.merge(recent)
        self._parts.append((at_s, recent))
        self.forget(at_s)

    def forget(self, now_s: float) -> None:
        while self._parts and self._parts[0][0] < now_s - WINDOW_S:
            self.whole.take_out(self._parts.popleft()[1])


class RateWindow:
    """Growth rate of a count over the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, at_s: float, count: int) -> None:
        self._points.append((at_s, count))
        while len(self._points) > 2 and self._points[1][0] <= at_s - WINDOW_S:
            self._points.popleft()

    def per_s(self) -> float:
        """0 before two points in time."""
        (from_s, before), (to_s, after) = self._points[0], self._points[-1]
        return (after - before) / (to_s - from_s) if to_s > from_s else 0.0


class RunProgress:
    """Progress reports of all shards."""

    def __init__(
        self,
        zero: Zero,
        where: Sequence[str],
        *,
        planned: int | None,
        last_send_s: float | None = None,
        ends_s: float | None = None,
        target_rate: TargetRate | None = None,
        stopping: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``ends_s``: all is cancelled then; null: it finishes.

        ``stopping`` returns the reason for stopping; null: not stopping.
        """
        self._stopping = stopping
        self._zero = zero
        self._where = where
        self._planned = planned
        self._last_send_s, self._ends_s = last_send_s, ends_s
        self._target_rate = target_rate
        self._counts = [Counts() for _ in where]
        self._heard_s = [0.0 for _ in where]
        self._over: set[int] = set()
        self._recent = RecentWindow()
        self._sent, self._tokens = RateWindow(), RateWindow()
        self._begun_s = self.elapsed_s()

    def hear(self, shard: int, message: Progress | Done | Failed) -> None:
        self._heard_s[shard] = now_s = self.elapsed_s()
        if isinstance(message, Progress):
            self._counts[shard] = message.counts
            self._recent.add(now_s, message.recent)
            return
        self._over.add(shard)
        if isinstance(message, Done):
            self._counts[shard] = message.tally.counts()
            self._recent.add(now_s, message.tally.take_recent())

    def elapsed_s(self) -> float:
        return max(0.0, (time.perf_counter_ns() - self._zero.at_ns) / 1e9)

    def status(self) -> Status:
        now_s = self.elapsed_s()
        counts = self._total()
        self._sent.add(now_s, counts.started)
        self._tokens.add(now_s, counts.output_tokens)
        self._recent.forget(now_s)
        waits: dict[str, float | None] = {}
        for name, sample in zip(("ttft", "itl", "lag"), self._recent.whole.samples, strict=True):
            waits[f"{name}_p50_ms"], waits[f"{name}_p99_ms"] = _p50_p99(sample)
        return Status(
            elapsed_s=round(now_s, 3),
            remaining_s=self._remaining_s(now_s, counts),
            stopping=self._stopping(),
            planned=self._planned,
            sent=counts.started,
            in_flight=counts.in_flight,
            done=counts.statuses["ok"],
            errors=counts.failed,
            queued=counts.held,
            target_rate=None if self._target_rate is None else self._target_rate(now_s),
            rate=round(self._sent.per_s(), 3),
            output_tokens_per_s=round(self._tokens.per_s(), 3),
            **waits,
            hit_rate=round(counts.cached_tokens / counts.looked_up_tokens, 4) if counts.looked_up_tokens else None,
            shards=[self._shard(index, now_s) for index in range(len(self._where))],
        )

    def reports_cached(self) -> bool | None:
        """Return True if a completed request had cached tokens; null: none has completed."""
        if any(counts.cached_reported for counts in self._counts):
            return True
        return False if any(counts.statuses["ok"] for counts in self._counts) else None

    def _remaining_s(self, now_s: float, counts: Counts) -> float | None:
        left_s = remaining_s(
            now_s,
            counts.started,
            counts.ended,
            planned=self._planned,
            last_send_s=self._last_send_s,
            begun_s=self._begun_s,
        )
        if self._ends_s is None:
            return left_s
        to_end_s = round(max(self._ends_s - now_s, 0.0), 1)
        return to_end_s if left_s is None else min(left_s, to_end_s)

    def only_refusals(self) -> bool:
        return all(counts.only_refusals for counts in self._counts)

    def _total(self) -> Counts:
        total = Counts()
        for counts in self._counts:
            total.add_counts(counts)
        return total

    def _shard(self, index: int, now_s: float) -> ShardStatus:
        counts, silent_s = self._counts[index], now_s - self._heard_s[index]
        return ShardStatus(
            where=self._where[index],
            sent=counts.started,
            in_flight=counts.in_flight,
            errors=counts.failed,
            silent_s=round(silent_s, 1) if silent_s > SILENT_S and index not in self._over else None,
        )


def remaining_s(
    now_s: float,
    started: int,
    ended: int,
    *,
    planned: int | None,
    last_send_s: float | None,
    begun_s: float = 0.0,
) -> float | None:
    """Return seconds to the end; null: unknown.

    Sends still to come take until the last of them, by the plan. Other requests take the pace of the whole run, which
    does not jump as that of the last seconds does. While few have ended, half of those started count as ended.
    """
    to_send_s = 0.0 if last_send_s is None else max(last_send_s - now_s, 0.0)
    left = started - ended if planned is None or to_send_s else planned - ended
    pace = max(ended, started / 2) / max(now_s - begun_s, 1e-3)
    if last_send_s is None and (planned is None or not pace):
        return None
    return round(to_send_s + (max(left, 0) / pace if pace else 0.0), 1)


def _p50_p99(sample: Sample) -> tuple[float | None, float | None]:
    if not sample.count:
        return None, None
    p50, p99 = sample.quantiles(0.5, 0.99)
    return round(p50, 3), round(p99, 3)
