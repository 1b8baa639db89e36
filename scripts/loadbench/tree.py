"""CPU over time and memory of a process and its children. Linux only."""

import contextlib
import os
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

from scripts.proxybench.processes import children, cpu_ns

SAMPLE_S = 0.1
PSS_EVERY = 10
"""Reading shares of pages stops the process that is read for milliseconds: once a second, never in a latency run."""


@dataclass(slots=True)
class TreeCost:
    """A tree's samples."""

    at_ns: list[int] = field(default_factory=list)
    """``perf_counter_ns``."""
    cpu_ns: list[int] = field(default_factory=list)
    """Of all processes seen so far, the ended ones at their last sample."""
    pss_mb: float = 0.0
    """Highest: each page shared by n processes counts a nth in each."""
    rss_mb: float = 0.0
    """Highest sum of resident memory; shared pages count in each."""
    processes: int = 0
    """Most at once."""

    def cpu_between(self, start_ns: int, end_ns: int) -> float | None:
        """CPU seconds between two moments, to the sample; null: no two samples within."""
        first, last = bisect_left(self.at_ns, start_ns), bisect_left(self.at_ns, end_ns) - 1
        if last <= first:
            return None
        scale = (end_ns - start_ns) / (self.at_ns[last] - self.at_ns[first])
        return (self.cpu_ns[last] - self.cpu_ns[first]) * scale / 1e9


class TreeWatch:
    """Samples a process tree from a thread until ``stop``."""

    def __init__(self, root: int, *, memory: bool) -> None:
        self._root, self._memory = root, memory
        self._cost = TreeCost()
        self._cpu_by_pid: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> TreeCost:
        """The samples."""
        self._over.set()
        self._thread.join()
        return self._cost

    def _watch(self) -> None:
        turn = 0
        while not self._over.wait(SAMPLE_S):
            pids = [self._root, *children(self._root)]
            for pid in pids:
                with contextlib.suppress(OSError):
                    self._cpu_by_pid[pid] = cpu_ns(pid)
            self._cost.at_ns.append(time.perf_counter_ns())
            self._cost.cpu_ns.append(sum(self._cpu_by_pid.values()))
            self._cost.processes = max(self._cost.processes, len(pids))
            if self._memory:
                self._cost.rss_mb = max(self._cost.rss_mb, sum(map(_rss_mb, pids)))
                if turn % PSS_EVERY == PSS_EVERY // 2:
                    self._cost.pss_mb = max(self._cost.pss_mb, sum(map(_pss_mb, pids)))
            turn += 1


def _rss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def _pss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0
