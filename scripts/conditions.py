"""Conditions of a benchmark: the machine, and the CPU share of other processes."""

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
    """Load average of the minute before the run."""
    other_share: float
    """Share of all cores used by other processes during the run."""

    def __str__(self) -> str:
        return f"{self.machine}; {self.seconds:.0f} s; other processes used {self.other_share:.0%} of the machine"


class Watch:
    """Records the CPU usage of the machine from its creation on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_ns, self._used_ns = machine_busy_ns(), used_ns()
        self._load = os.getloadavg()[0]

    def stop(self, pids: Iterable[int]) -> Conditions:
        """Return the conditions until now; ``pids``: running processes of the benchmark."""
        seconds = time.monotonic() - self._started
        benchmark_ns = used_ns() - self._used_ns + sum(cpu_ns(pid) for pid in pids)
        other_ns = machine_busy_ns() - self._busy_ns - benchmark_ns
        return Conditions(machine(), seconds, self._load, max(0.0, other_ns / 1e9 / seconds / (os.cpu_count() or 1)))


def used_ns() -> int:
    """Return the CPU time of this process and its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_ns(os.getpid()) + int((children.ru_utime + children.ru_stime) * 1e9)


def machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
