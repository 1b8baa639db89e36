"""Machine code of the step loops on disk."""

from typing import Any

from measure.machinecode.digests import digest_of
from sim.kernels.groupsteps import run as run_groups
from sim.kernels.loop import run, run_simple


def test_each_loop_has_machine_code_of_its_own() -> None:
    """All have one source: a file is named by function, and is told apart by the kernels that it calls."""
    loops: list[Any] = [run, run_simple, run_groups]
    assert len({loop.function.__qualname__ for loop in loops}) == 3
    assert len({digest_of(loop.function) for loop in loops}) == 3
