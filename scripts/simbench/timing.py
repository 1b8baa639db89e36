"""Wall time and CPU time of functions and commands."""

import resource
import subprocess
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time

Figures = dict[str, float]


def measure(name: str, runs: int, work: Callable[[], object]) -> Figures:
    """Return medians over ``runs`` after a warm-up, and the minimum CPU time, in s."""
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
    """Return the minimum times over ``runs`` after a warm-up, and peak memory; ``runs`` 0: the warm-up."""
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
