"""State of the tap as the admin process knows it, and the reasons against readiness."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from tap.ipc.messages import AdminSetup, TapStats
from wire.errors import WireError
from wire.url import parse_url

RATE_SAMPLES: Final = 10
PROBE_INTERVAL_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 3.0
RECORDER_SILENCE_S: Final = 15.0
"""Silence after which the recorder counts as down; it reports once a second, later only during a long tokenization."""


class LiveState:
    """The tap as the supervisor told it last, and its upstreams as they were probed."""

    def __init__(self, setup: AdminSetup) -> None:
        self.setup = setup
        self.stats: TapStats | None = None
        """Null: the supervisor has not reported yet."""
        self.reachable: dict[str, bool] = {}
        """Upstreams that were tried, and whether they took a connection lately."""
        self.requests_a_second = 0.0
        self._relayed: deque[tuple[float, int]] = deque(maxlen=RATE_SAMPLES)

    def take(self, stats: TapStats, now_s: float) -> None:
        self.stats = stats
        self._relayed.append((now_s, sum(worker.relayed for worker in stats.worker_stats)))
        (began_s, before), (ended_s, after) = self._relayed[0], self._relayed[-1]
        self.requests_a_second = max(0, after - before) / (ended_s - began_s) if ended_s > began_s else 0.0
        self.reachable = {url: up for url, up in self.reachable.items() if url in stats.upstreams}

    def reasons_against_upstreams(self) -> dict[str, str | None]:
        """Return, by upstream, the reason against new sessions there; null: it gets some."""
        stats = self.stats
        if stats is None:
            return {}
        ejected = {one.upstream for worker in stats.worker_stats for one in worker.upstreams if one.ejected}
        return {one: "left out after failures" if one in ejected else None for one in stats.upstreams}

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
    """Return whether a TCP connection to this server opens; nothing is sent on it."""
    try:
        address = parse_url(origin)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
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
