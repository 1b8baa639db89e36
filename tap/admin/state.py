"""State of the admin process, from its feeds and the supervisor: the source of all pages and metrics."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from measure.histogram import OVERHEAD_S, WAIT_S, HistogramCounts, add_counts, empty_counts
from tap.ipc.exchange import AdminSetup, ServiceStats
from tap.ipc.feed import RecorderStats, WorkerStats
from tracefile.records.schema import Engine

KEPT_MINUTES: Final = 5
KEPT_SAMPLES: Final = 60 * KEPT_MINUTES
RATE_SAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of about one second."""

    span_s: float
    """Seconds since the previous sample."""
    requests: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    dropped: float = 0.0
    in_flight: int = 0
    ttft: Sequence[float] = ()
    """Requests that got their first token, by bucket of ``WAIT_S``."""


class Growth:
    """Growth of a total over several processes; a total that restarts takes nothing back."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}

    def since_last(self, totals: Mapping[int, float]) -> float:
        """Return the growth since the last call; a new process's first total counts as no growth."""
        grown = 0.0
        for process, total in totals.items():
            last = self._last.get(process, total)
            grown += total - last if total >= last else total
            self._last[process] = total
        return grown


class Timeline:
    """Samples of the last minutes, a second apart."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def line(self, value: Callable[[Sample], float]) -> list[float]:
        return [round(value(sample), 3) for sample in self._samples]

    def total(self, value: Callable[[Sample], float]) -> float:
        return sum(map(value, self._samples))

    def rate(self, value: Callable[[Sample], float]) -> float:
        last = list(islice(reversed(self._samples), RATE_SAMPLES))
        span_s = sum(sample.span_s for sample in last)
        return sum(map(value, last)) / span_s if span_s else 0.0

    def ttft(self) -> HistogramCounts:
        counts = [sum(bucket) for bucket in zip(*(sample.ttft for sample in self._samples if sample.ttft), strict=True)]
        return HistogramCounts([int(count) for count in counts])


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
        self.timeline = Timeline()
        self._ticked_s: float | None = None
        self._growth = {name: Growth() for name in ("requests", "prompt", "cached", "output", "in", "out", "dropped")}
        self._ttft_growth = [Growth() for _ in range(len(WAIT_S) + 1)]

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

    def take(self, message: WorkerStats | RecorderStats | ServiceStats, now_s: float) -> None:
        if isinstance(message, WorkerStats):
            self.workers[message.worker] = message
            self._workers_heard_s[message.worker] = now_s
        elif isinstance(message, RecorderStats):
            self.recorder, self.recorder_heard_s = message, now_s
        else:
            self.service = message
            self.reachable = {url: up for url, up in self.reachable.items() if url in message.upstreams}

    def tick(self, now_s: float) -> None:
        for number in [number for number in self.workers if now_s - self._workers_heard_s[number] > WORKER_SILENCE_S]:
            del self.workers[number]
        before, self._ticked_s = self._ticked_s, now_s
        sample = self._sample(0.0 if before is None else now_s - before)
        if before is not None and now_s > before:  # a rate over no time has no value
            self.timeline.add(sample)

    @property
    def dropped(self) -> dict[str, int]:
        return {} if self.service is None else self.service.dropped

    def _sample(self, span_s: float) -> Sample:
        workers, recorder, growth = self.workers, self.recorder, self._growth
        ttft = [] if recorder is None else recorder.ttft.counts
        return Sample(
            span_s=span_s,
            requests=growth["requests"].since_last({number: worker.relayed for number, worker in workers.items()}),
            prompt_tokens=growth["prompt"].since_last({0: recorder.prompt_tokens} if recorder else {}),
            cached_tokens=growth["cached"].since_last({0: recorder.cached_tokens} if recorder else {}),
            output_tokens=growth["output"].since_last({0: recorder.output_tokens} if recorder else {}),
            bytes_in=growth["in"].since_last({number: worker.bytes_in for number, worker in workers.items()}),
            bytes_out=growth["out"].since_last({number: worker.bytes_out for number, worker in workers.items()}),
            dropped=growth["dropped"].since_last({0: sum(self.dropped.values())} if self.service else {}),
            in_flight=sum(worker.in_flight for worker in workers.values()),
            ttft=[one.since_last({0: count}) for one, count in zip(self._ttft_growth, ttft, strict=False)],
        )
