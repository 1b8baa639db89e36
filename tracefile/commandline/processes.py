"""Work in processes on every core of this machine."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import process
from itertools import islice
from typing import Any, Final, TypeVar

from tracefile.commandline.workers import usable_cores
from tracefile.records.errors import InputError

START_METHOD: Final = "fork" if sys.platform == "linux" else "spawn"
"""A forked process starts in milliseconds and shares the parent's memory. macOS's own libraries do not survive it."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(
    work: Callable[[Task], Result], tasks: Sequence[Task], *, procs: int | None = None
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result, in the order in which they end.

    Processes are forked on Linux and have ``work`` as it is; elsewhere it is pickled once for each. ``procs``:
    processes, None: one per core. Raises InputError if one dies.
    """
    procs = min(procs or usable_cores(), len(tasks))
    if procs < 2:
        yield from ((task, work(task)) for task in tasks)
        return
    context = multiprocessing.get_context(START_METHOD)
    pool = futures.ProcessPoolExecutor(procs, context, initializer=_hold, initargs=(work,))
    before = multiprocessing.active_children()
    left = iter(tasks)
    try:
        # Few at a time: a pool that breaks while it is given tasks leaves its other processes running.
        task_of = {pool.submit(_run, task): task for task in islice(left, 2 * procs)}
        while task_of:
            for done in futures.wait(task_of, return_when=futures.FIRST_COMPLETED).done:
                task = task_of.pop(done)
                task_of |= {pool.submit(_run, following): following for following in islice(left, 1)}
                yield task, done.result()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - set(before):
            child.terminate()
        if isinstance(error, process.BrokenProcessPool):
            advice = "expected more, or procs = 1"
            raise InputError(f"a process of this command died, as for want of memory; {advice}") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_held: list[Callable[[Any], Any]] = []
"""Work of this process."""


def _hold(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    _held.append(work)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _held[0](task)
