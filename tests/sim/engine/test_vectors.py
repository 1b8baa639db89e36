"""Vectors that Python passes to compiled code are freed: mypyc loses a reference to one that it unboxes for a call."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from measure.cache.hashtable import HashTable
from measure.cache.stackdepth import LruStack
from measure.cache.vectors import floats, integers
from sim.engine.columns import RequestColumns
from sim.engine.gap_json import GapTexts
from sim.latency.stepnoise import StepNoise
from sim.vllm.kvcache import single_group_cache
from sim.vllm.request import Request
from tracefile.compiled import uses_compiled

SIZE = 500_000
"""Numbers of four megabytes."""
CALLS = 20
STATM = Path("/proc/self/statm")


def make_columns() -> None:
    none, no_times = integers(np.empty(0)), floats(np.empty(0))
    RequestColumns([], integers(np.ones(SIZE)), (none,) * 7, (no_times,) * 4)
    RequestColumns([], none, (integers(np.ones(SIZE)),) * 7, (floats(np.ones(SIZE)),) * 4).make(floats(np.ones(SIZE)))


def make_noise() -> None:
    numbers = floats(np.ones(SIZE))
    StepNoise(knots=floats([1.0]), table=numbers, normals=numbers, key=1, weights=(0.5, 0.5), correlation_ms=1.0)


CALLED: dict[str, Callable[[], object]] = {
    "request": lambda: Request("r", 1, 1, integers(np.ones(SIZE))),
    "columns": make_columns,
    "noise": make_noise,
    "gaps": lambda: GapTexts(floats([1.0, 2.0])).array(integers(np.zeros(SIZE))),
    "lookup": lambda: single_group_cache(16, 10).count_hits(integers(np.ones(SIZE))),
    "numbers": lambda: HashTable().number(integers(np.ones(SIZE))),
    "depths": lambda: LruStack(SIZE, 2).access_depths(integers(np.ones(SIZE)), integers([0, 1])),
}


@pytest.mark.skipif(not (STATM.exists() and uses_compiled()), reason="no /proc, or not compiled")
@pytest.mark.parametrize("name", CALLED)
def test_memory_of_a_vector_is_freed_after_the_call(name: str) -> None:
    CALLED[name]()
    CALLED[name]()
    before = pages()
    for _ in range(CALLS):
        CALLED[name]()
    assert (pages() - before) * 4096 < CALLS * 8 * SIZE / 4


def pages() -> int:
    """Return the pages of this process in memory."""
    return int(STATM.read_text().split()[1])
