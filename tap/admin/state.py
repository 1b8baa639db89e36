"""State of a tap at one moment, and the reasons against its readiness."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tap.ipc.messages import Progress, WorkerStats

RECORDER_SILENCE_S: Final = 15.0
"""Silence after which the recorder counts as down; it reports once a second, later only during a long tokenization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStats:
    """State of the tap's processes and upstreams, and the numbers that each process reported last."""

    upstreams: Sequence[str]
    """Origins of new requests."""
    reachable: Mapping[str, bool] = field(default_factory=dict)
    """Upstreams that were tried, and whether they took a connection lately."""
    workers: int
    workers_up: int = 0
    worker_restarts: int = 0
    recorder_up: bool = False
    recorder_restarts: int = 0
    recorder_silent_s: float = 0.0
    """Since the recorder's last report."""
    offered: int = 0
    """Requests to be recorded so far, of all workers, dead ones included."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False
    """The tap is ending: no new connections."""
    worker_stats: Sequence[WorkerStats] = ()
    """Latest numbers of each live worker."""
    progress: Progress = field(default_factory=Progress)

    @property
    def ejected(self) -> set[str]:
        """Upstreams that get no requests for a while after failures."""
        return {one.upstream for worker in self.worker_stats for one in worker.upstreams if one.ejected}

    def reasons_against(self) -> list[str]:
        """Return the reasons against serving, in words; none: ready."""
        reasons = ["the tap is draining"] if self.draining else []
        if self.workers_up == 0:
            reasons.append("no worker is up")
        if not any(self.reachable.values()):
            reasons.append("no upstream takes connections" if self.reachable else "no upstream has been tried yet")
        return reasons

    def reasons_not_recording(self) -> list[str]:
        """Return the reason why served requests leave no records, in words; none: they do."""
        if not self.recorder_up:
            return ["the recorder is down"]
        if self.recorder_silent_s > RECORDER_SILENCE_S:
            return [f"the recorder has been silent for {self.recorder_silent_s:.0f} s"]
        return [] if self.progress.writing else ["the recorder cannot write the trace"]
