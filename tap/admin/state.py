"""State of a tap for the admin pages, and the reasons for not being ready."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tap.ipc.messages import Progress, WorkerStats

RECORDER_SILENCE_S: Final = 15.0
"""Time without a report after which the recorder counts as down; it reports every second, unless it tokenizes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStats:
    """State of processes and upstreams, and the last report of each process (token counts, TTFT, ITL)."""

    upstreams: Sequence[str]
    """Origins of new requests."""
    reachable: Mapping[str, bool] = field(default_factory=dict)
    """Upstream: whether the last connection attempt succeeded."""
    workers: int
    workers_up: int = 0
    worker_restarts: int = 0
    recorder_up: bool = False
    recorder_restarts: int = 0
    recorder_silent_s: float = 0.0
    """Time since the recorder's last report."""
    offered: int = 0
    """Requests to record, of all workers, crashed workers included."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False
    """The tap is ending: no new connections."""
    worker_stats: Sequence[WorkerStats] = ()
    """Last report of each live worker."""
    progress: Progress = field(default_factory=Progress)

    @property
    def ejected(self) -> set[str]:
        return {stats.upstream for worker in self.worker_stats for stats in worker.upstreams if stats.ejected}

    def not_ready_reasons(self) -> list[str]:
        """Return the reasons why the tap is not ready; empty: ready."""
        reasons = ["the tap is draining"] if self.draining else []
        if self.workers_up == 0:
            reasons.append("no worker is up")
        if not any(self.reachable.values()):
            reasons.append("no upstream accepts connections" if self.reachable else "no upstream was probed yet")
        return reasons

    def not_recording_reasons(self) -> list[str]:
        """Return the reason why requests are not recorded; empty: recorded."""
        if not self.recorder_up:
            return ["the recorder is down"]
        if self.recorder_silent_s > RECORDER_SILENCE_S:
            return [f"no report of the recorder for {self.recorder_silent_s:.0f} s"]
        return [] if self.progress.writing else ["the recorder cannot write the trace"]
