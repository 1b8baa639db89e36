"""Work on what others leave of a core, so that a worker on the same core never waits for it, until it falls behind.

Linux preempts a SCHED_IDLE thread as soon as another of its session or container wakes, and an unprivileged thread
cannot leave that class. So there are two threads, one at work at a time.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


def do_all(steps: Iterator[bool]) -> None:
    """Do all steps on a thread of leftovers; while a step says that it is behind, on this one."""
    with ThreadPoolExecutor(1, "leftovers", initializer=_take_leftovers) as leftovers:
        while leftovers.submit(_advance, steps, False).result() and _advance(steps, True):
            pass


def _advance(steps: Iterator[bool], behind: bool) -> bool:
    """Do steps, one at least, for as long as they say ``behind``; return False after the last."""
    return any(said != behind for said in steps)


def _take_leftovers() -> None:
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
