"""State of the tap as the admin process knows it, its history of some minutes, and the reasons against readiness."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from measure.histogram import OVERHEAD_S, HistogramCounts, add_counts, empty_counts
from tap.ipc.messages import AdminSetup, TapStats
from wire.client.proxies import proxy_of
from wire.errors import WireError
from wire.url import parse_url

KEPT_MINUTES: Final = 5
RATE_SAMPLES: Final = 10
PROBE_INTERVAL_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 3.0
RECORDER_SILENCE_S: Final = 15.0
"""Silence after which the recorder counts as down; it reports once a second, later only during a long tokenization."""


class Totals(msgspec.Struct, frozen=True):
    """Totals of the whole tap at a moment; the restart of a process may set one back."""

    at_s: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    bytes_in: int
    bytes_out: int
    dropped: int
    in_flight: int
    ttft: list[int]
    """Requests that got their first token, by bucket of ``WAIT_S``."""


class LiveState:
    """Takes the tap's state once a second, by a monotonic clock."""

    def __init__(self, setup: AdminSetup) -> None:
        self.setup = setup
        self.stats: TapStats | None = None
        """Null: the supervisor has not reported yet."""
        self.reachable: dict[str, bool] = {}
        """Upstreams that were tried, and whether they took a connection lately."""
        self._history: deque[Totals] = deque(maxlen=60 * KEPT_MINUTES + 1)

    def take(self, stats: TapStats, now_s: float) -> None:
        self.stats = stats
        self.reachable = {url: up for url, up in self.reachable.items() if url in stats.upstreams}
        workers, numbers = stats.worker_stats, stats.progress.numbers
        if self._history and now_s <= self._history[-1].at_s:  # a rate over no time has no value
            self._history.pop()
        self._history.append(
            Totals(
                at_s=now_s,
                requests=sum(worker.relayed for worker in workers),
                prompt_tokens=numbers.prompt_tokens,
                cached_tokens=numbers.cached_tokens,
                output_tokens=numbers.output_tokens,
                bytes_in=sum(worker.bytes_in for worker in workers),
                bytes_out=sum(worker.bytes_out for worker in workers),
                dropped=sum(stats.dropped.values()),
                in_flight=sum(worker.in_flight for worker in workers),
                ttft=numbers.ttft.counts,
            )
        )

    def growth(self, name: str) -> int:
        """Return the growth of a total in the last minutes; one that was set back grows from there."""
        return sum(max(0, getattr(after, name) - getattr(before, name)) for before, after in pairwise(self._history))

    def line(self, name: str) -> list[float]:
        """Return a total's growth a second, one value for each second."""
        return [
            round(max(0, getattr(after, name) - getattr(before, name)) / (after.at_s - before.at_s), 3)
            for before, after in pairwise(self._history)
        ]

    def rate(self, name: str) -> float:
        last = self.line(name)[-RATE_SAMPLES:]
        return sum(last) / len(last) if last else 0.0

    def levels(self) -> list[float]:
        return [totals.in_flight for totals in self._history]

    def ttft(self) -> HistogramCounts:
        """Return the first tokens of the last minutes."""
        pairs = [(one.ttft, other.ttft) for one, other in pairwise(self._history) if one.ttft and other.ttft]
        grown = [[max(0, now - before) for before, now in zip(*pair, strict=True)] for pair in pairs]
        return HistogramCounts([sum(bucket) for bucket in zip(*grown, strict=True)])

    def overheads(self) -> dict[str, HistogramCounts]:
        """Return the time spent in the tap by part of the exchange."""
        parts = {"response_head": empty_counts(OVERHEAD_S), "chunk": empty_counts(OVERHEAD_S)}
        if self.stats is None:
            return parts
        for worker in self.stats.worker_stats:
            add_counts(parts["response_head"], worker.response_head)
            add_counts(parts["chunk"], worker.chunk)
        return parts | {"request_head": self.stats.progress.numbers.request_head}

    def reasons_against_upstreams(self) -> dict[str, str | None]:
        """Return, by upstream, the reason against new sessions there; null: it gets some."""
        stats = self.stats
        if stats is None:
            return {}
        ejected = {one.upstream for worker in stats.worker_stats for one in worker.upstreams if one.ejected}
        failing = dict.fromkeys(ejected, "left out after failures")
        failing |= dict.fromkeys(stats.unhealthy_upstreams, "its checks fail")
        return {upstream: failing.get(upstream) for upstream in stats.upstreams}

    def reasons_against(self) -> list[str]:
        """Return the reasons against serving, in words; none: ready."""
        reasons, stats = [], self.stats
        if stats is None:
            reasons.append("the tap has not reported yet")
        else:
            if stats.draining:
                reasons.append("the tap is draining")
            if stats.workers_up == 0:
                reasons.append("no worker is up")
            if stats.upstreams and not set(stats.upstreams) - set(stats.unhealthy_upstreams):
                reasons.append("no upstream is healthy")
        if not any(self.reachable.values()):
            reasons.append("no upstream takes connections" if self.reachable else "no upstream has been tried yet")
        return reasons

    def reasons_not_recording(self) -> list[str]:
        """Return the reason why served requests leave no records, in words; none: they do."""
        stats = self.stats
        if stats is None or not stats.recorder_up:
            return ["the recorder is down"]
        if stats.recorder_silent_s > RECORDER_SILENCE_S:
            return [f"the recorder has been silent for {stats.recorder_silent_s:.0f} s"]
        return [] if stats.progress.writing else ["the recorder cannot write the trace"]


async def takes_connections(origin: str) -> bool:
    """Return whether a TCP connection to this server, or to its proxy, opens; nothing is sent on it."""
    try:
        address = parse_url(origin)
        first = proxy_of(address) or address
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(first.host, first.port)
    except (OSError, TimeoutError, WireError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def probe_upstreams(state: LiveState) -> None:
    while True:
        origins = [] if state.stats is None else state.stats.upstreams
        await probe_once(state, origins)
        await asyncio.sleep(PROBE_INTERVAL_S if any(state.reachable.values()) else 0.1)


async def probe_once(state: LiveState, origins: Sequence[str]) -> None:
    found = await asyncio.gather(*map(takes_connections, origins))
    state.reachable = dict(zip(origins, found, strict=True))
