"""Conditions of a benchmark: the machine, and the share of it that other processes took."""

import os
import platform
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.processes import cpu_ns, machine_busy_ns


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a run."""

    machine: str
    seconds: float
    load_before: float
    """The load average of the minute before."""
    others_share: float
    """Share of all cores that processes of others used meanwhile."""

    def __str__(self) -> str:
        return f"{self.machine}; {self.seconds:.0f} s; other processes used {self.others_share:.0%} of the machine"


class Watch:
    """Notes the machine's state when it is made."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_ns, self._own_ns = machine_busy_ns(), own_ns()
        self._load = os.getloadavg()[0]

    def stop(self, pids: Iterable[int]) -> Conditions:
        """The conditions up to now; ``pids`` are processes, started since, that are not others'."""
        seconds = time.monotonic() - self._started
        ours = own_ns() - self._own_ns + sum(cpu_ns(pid) for pid in pids)
        others = machine_busy_ns() - self._busy_ns - ours
        return Conditions(machine(), seconds, self._load, max(0.0, others / 1e9 / seconds / (os.cpu_count() or 1)))


def own_ns() -> int:
    """CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_ns(os.getpid()) + int((children.ru_utime + children.ru_stime) * 1e9)


def machine() -> str:
    """Processor, kernel and interpreter in a line."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
