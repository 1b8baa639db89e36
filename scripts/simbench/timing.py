"""Wall and CPU seconds of a piece of work."""

import resource
import subprocess
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time

Figures = dict[str, float]


def measure(name: str, runs: int, work: Callable[[], object]) -> Figures:
    """Medians over ``runs`` of ``work``, which has run once before, and the least CPU time."""
    work()
    walls, cpus = [], []
    for _ in range(runs):
        wall, cpu = perf_counter(), process_time()
        work()
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    seconds = {"wall": median(walls), "cpu": median(cpus), "least_cpu": min(cpus)}
    return {f"{name}_{kind}_s": round(value, 5) for kind, value in seconds.items()}


def measure_command(name: str, runs: int, command: Sequence[str]) -> Figures:
    """The fastest of ``runs`` of a command, after one that does not count; its largest memory. ``runs`` 0: that one."""
    walls, cpus = [], []
    for _ in range(runs + 1):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(perf_counter() - start)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    counted = slice(min(runs, 1), None)
    return {
        f"{name}_wall_s": round(min(walls[counted]), 3),
        f"{name}_cpu_s": round(min(cpus[counted]), 3),
        f"{name}_rss_mib": round(after.ru_maxrss / 1024),
    }
