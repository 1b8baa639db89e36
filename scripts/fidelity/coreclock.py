"""Speed of the engine's core during a capture, from the same small work repeated on it.

A shared host has its own opinion of how fast a core is. This measures it beside the engine, whatever the engine does
and whatever a model says of it: in CPU time, which waiting for the engine is no part of. It takes half a per cent of
the core.

    python -m scripts.fidelity.coreclock CORE    # until its standard input ends; prints what it measured as JSON
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EVERY_S = 0.5
LOOPS = 5_000
PRODUCTS, SIZE = 5, 128


@dataclass(slots=True)
class CoreClock:
    """CPU time of the same work, its mean over a capture. Nulls: nothing was measured yet."""

    python_ms: float | None = None
    """A loop of the interpreter, as an engine's own code between steps is."""
    matrix_ms: float | None = None
    """Products of small float32 matrices, as a model's layers are."""


@contextlib.contextmanager
def clocked(core: int | None) -> Iterator[CoreClock]:
    """Measure a core for the length of the ``with`` block; what comes of it is there after the block. Null: no core."""
    found = CoreClock()
    if core is None:
        yield found
        return
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, str(Path(__file__)), str(core)]
    pipe, own = subprocess.PIPE, os.environ | one_thread
    # In a session of its own: Ctrl-C is for who waits for it, and ends its input.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=own, text=True, start_new_session=True) as process:
        try:
            yield found
        finally:
            said, _ = process.communicate()
    measured = json.loads(said)
    found.python_ms, found.matrix_ms = measured["python_ms"], measured["matrix_ms"]


def measure(core: int) -> dict[str, float | None]:
    """Work on a core until standard input ends. The mean of each work's middle nine tenths, ms."""
    os.sched_setaffinity(0, {core})
    matrix = np.ones((SIZE, SIZE), dtype=np.float32)
    works: dict[str, Callable[[], object]] = {
        "python_ms": lambda: sum(number * number for number in range(LOOPS)),
        "matrix_ms": lambda: [matrix @ matrix for _ in range(PRODUCTS)],
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        for name, work in works.items():
            work()  # brings its data back into the caches, which the engine has used meanwhile
            began = time.thread_time()
            work()
            found[name].append(1000 * (time.thread_time() - began))
    return {name: middle_mean(times) for name, times in found.items()}


def middle_mean(values: list[float]) -> float | None:
    """Mean without the largest and the smallest twentieth; null of nothing."""
    cut = len(values) // 20
    kept = sorted(values)[cut : len(values) - cut]
    return round(sum(kept) / len(kept), 4) if kept else None


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
