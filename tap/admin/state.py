"""State of the admin process, from its feeds and the supervisor: the source of all pages and metrics."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from measure.histogram import OVERHEAD_S, HistogramCounts, add_counts, empty_counts
from tap.admin.cachecurve import CacheCurve
from tap.admin.survival import SurvivalCurves
from tap.admin.timeline import Growth, Sample, Timeline, Window
from tap.ipc.exchange import AdminSetup, ServiceStats
from tap.ipc.feed import RecorderStats, RecordFeed, SeenRecord, WorkerStats
from tracefile.records.schema import Engine

CAPACITY: Final = 4_096
TOP: Final = 8
NESTED_SHARE: Final = 0.9
"""A prefix is not shown if nearly all of its requests share a longer one."""


@dataclass(slots=True)
class Passes:
    """Requests with a prefix, in one minute."""

    requests: int = 0
    openings: int = 0
    """Requests among them that began a conversation, as far as known."""


@dataclass(slots=True)
class BranchPoint:
    """A prefix shared by requests up to this block, where some diverge."""

    hash: int
    blocks: int
    window: Window[Passes] = field(default_factory=lambda: Window(Passes))
    within: int | None = None
    """Hash of the nearest point above. Null: unknown."""

    def passed(self, requests: int, opening: bool, now_s: float) -> None:
        minute = self.window.bucket(now_s)
        minute.requests += requests
        minute.openings += opening

    def requests(self, now_s: float) -> int:
        """Return the recent requests with it, at least; 0 if none began a conversation."""
        minutes = self.window.buckets(now_s)
        return sum(minute.requests for minute in minutes) if any(minute.openings for minute in minutes) else 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A shared prefix, for a line of the page."""

    hash: int
    blocks: int
    requests: int


class SharedPrefixes:
    """Takes requests in order, and finds the prefixes with most of the recent tokens, in bounded memory.

    Only branch points are kept: places where a request diverges from earlier requests. The point not passed for longest
    is removed first, so a prefix of at least one request in ``capacity`` is never lost. Requests count from the point's
    discovery on: never too many. A conversation's own past, which only its later turns have, is no shared prefix.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points: OrderedDict[int, BranchPoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._points)

    def take(self, hashes: Sequence[int], seen_blocks: int, now_s: float, *, opening: bool) -> None:
        """Count one request, whose ``seen_blocks`` leading blocks an earlier one had.

        ``opening``: it is no later turn of a conversation, as far as is known.
        """
        points = self._points
        within = None
        for block in [block for block in hashes if block in points]:
            points[block].passed(1, opening, now_s)
            points[block].within = within
            points.move_to_end(block)
            within = block
        if seen_blocks and hashes[seen_blocks - 1] not in points:
            self._discover(BranchPoint(hashes[seen_blocks - 1], seen_blocks), opening, now_s)

    def top(self, now_s: float) -> list[SharedPrefix]:
        """The prefixes that hold most tokens of recent requests, the most first; none twice in two lengths."""
        requests = {block: point.requests(now_s) for block, point in self._points.items()}
        goes_on = {
            point.within
            for block, point in self._points.items()
            if point.within is not None and requests[block] >= NESTED_SHARE * requests.get(point.within, 0)
        }
        told = [
            SharedPrefix(block, point.blocks, requests[block])
            for block, point in self._points.items()
            if requests[block] >= 2 and block not in goes_on
        ]
        return sorted(told, key=lambda prefix: (-prefix.blocks * prefix.requests, prefix.hash))[:TOP]

    def _discover(self, point: BranchPoint, opening: bool, now_s: float) -> None:
        point.passed(2, opening, now_s)
        self._points[point.hash] = point
        if len(self._points) > self._capacity:
            self._points.popitem(last=False)


WORKER_SILENCE_S: Final = 10.0
"""A worker pushes once a second; after this silence its numbers are removed."""


class LiveState:
    """Takes messages and ticks, by a monotonic clock."""

    def __init__(self, setup: AdminSetup) -> None:
        self.setup = setup
        self.service: ServiceStats | None = None
        """Null: the supervisor has not reported yet."""
        self.workers: dict[int, WorkerStats] = {}
        """Last numbers of each live worker, by number."""
        self._workers_heard_s: dict[int, float] = {}
        self.recorder: RecorderStats | None = None
        self.recorder_heard_s = float("-inf")
        self.reachable: dict[str, bool] = {}
        """Upstreams that were tried, and whether they took a connection lately."""
        self.curve = CacheCurve(setup.block_size)
        self.prefixes = SharedPrefixes()
        self.survival = SurvivalCurves()
        self.timeline = Timeline()
        self.records_seen = 0
        self._ticked_s: float | None = None
        self._growth = {name: Growth() for name in ("requests", "prompt", "output", "in", "out", "dropped")}

    @property
    def engine(self) -> Engine:
        known = None if self.service is None else self.service.engine
        return Engine() if known is None else known

    def overheads(self) -> dict[str, HistogramCounts]:
        """Return the time spent in the tap by part of the exchange."""
        parts = {"response_head": empty_counts(OVERHEAD_S), "chunk": empty_counts(OVERHEAD_S)}
        for worker in self.workers.values():
            add_counts(parts["response_head"], worker.response_head)
            add_counts(parts["chunk"], worker.chunk)
        return parts if self.recorder is None else parts | {"request_head": self.recorder.request_head}

    def reasons_against_upstreams(self) -> dict[str, str | None]:
        """Return, by upstream, the reason against new sessions there; null: it gets some."""
        service = self.service
        if service is None:
            return {}
        ejected = {one.upstream for worker in self.workers.values() for one in worker.upstreams if one.ejected}
        found: dict[str, str | None] = {}
        for upstream in service.upstreams:
            found[upstream] = None
            if upstream in service.stopped_upstreams:
                found[upstream] = "stopped"
            elif upstream in service.draining_upstreams:
                found[upstream] = "draining"
            elif upstream in service.unhealthy_upstreams:
                found[upstream] = "its checks fail"
            elif upstream in ejected:
                found[upstream] = "left out after failures"
        return found

    def take(self, message: WorkerStats | RecorderStats | RecordFeed | ServiceStats, now_s: float) -> None:
        """Take a message; a feed's records are better given to ``see`` with pauses."""
        if isinstance(message, WorkerStats):
            self.workers[message.worker] = message
            self._workers_heard_s[message.worker] = now_s
        elif isinstance(message, RecorderStats):
            self.recorder, self.recorder_heard_s = message, now_s
        elif isinstance(message, ServiceStats):
            self.service = message
            self.reachable = {url: up for url, up in self.reachable.items() if url in message.upstreams}
        else:
            for record in message.records:
                self.see(record, now_s)

    def see(self, record: SeenRecord, now_s: float) -> None:
        self.records_seen += 1
        self.survival.take(record, now_s)
        hashes, true = record.block_hashes, record.hashable_blocks
        if hashes is not None and record.prompt_tokens is not None:
            outputs = record.output_block_hashes or ()
            if true is not None and true < len(hashes):
                hashes, outputs = hashes[:true], ()
            seen_blocks = self.curve.take(hashes, record.prompt_tokens, record.cached_tokens, now_s, outputs)
            self.prefixes.take(hashes, seen_blocks, now_s, opening=record.turn in (None, 1))

    def tick(self, now_s: float) -> None:
        for number in [number for number in self.workers if now_s - self._workers_heard_s[number] > WORKER_SILENCE_S]:
            del self.workers[number]
        before, self._ticked_s = self._ticked_s, now_s
        sample = self._sample(0.0 if before is None else now_s - before)
        if before is not None:
            self.timeline.add(sample)

    @property
    def dropped(self) -> dict[str, int]:
        return {} if self.service is None else self.service.dropped

    def _sample(self, span_s: float) -> Sample:
        workers, recorder, growth = self.workers, self.recorder, self._growth
        return Sample(
            span_s=span_s,
            requests=growth["requests"].since_last({number: worker.relayed for number, worker in workers.items()}),
            prompt_tokens=growth["prompt"].since_last({0: recorder.prompt_tokens} if recorder else {}),
            output_tokens=growth["output"].since_last({0: recorder.output_tokens} if recorder else {}),
            bytes_in=growth["in"].since_last({number: worker.bytes_in for number, worker in workers.items()}),
            bytes_out=growth["out"].since_last({number: worker.bytes_out for number, worker in workers.items()}),
            dropped=growth["dropped"].since_last({0: sum(self.dropped.values())} if self.service else {}),
            in_flight=sum(worker.in_flight for worker in workers.values()),
            queue_bytes=sum(worker.queue_bytes for worker in workers.values()),
        )
