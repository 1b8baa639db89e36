"""Parallel work in one process per core."""

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
"""A forked process starts in milliseconds and shares the parent's memory. macOS libraries do not support fork."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(
    work: Callable[[Task], Result], tasks: Sequence[Task], *, procs: int | None = None
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result, in order of completion.

    Forked processes (Linux) inherit ``work``; elsewhere it is pickled once for each process. ``procs``: number of
    processes, None: one per core. Raises InputError if a process dies.
    """
    procs = min(procs or usable_cores(), len(tasks))
    if procs < 2:
        yield from ((task, work(task)) for task in tasks)
        return
    context = multiprocessing.get_context(START_METHOD)
    pool = futures.ProcessPoolExecutor(procs, context, initializer=_start_process, initargs=(work,))
    before = multiprocessing.active_children()
    remaining = iter(tasks)
    try:
        # Submit few tasks ahead: a pool that breaks during a submit leaves its other processes running.
        task_of = {pool.submit(_run, task): task for task in islice(remaining, 2 * procs)}
        while task_of:
            for done in futures.wait(task_of, return_when=futures.FIRST_COMPLETED).done:
                task = task_of.pop(done)
                task_of |= {pool.submit(_run, following): following for following in islice(remaining, 1)}
                yield task, done.result()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - set(before):
            child.terminate()
        if isinstance(error, process.BrokenProcessPool):
            advice = "expected more memory, or procs = 1"
            raise InputError(f"a worker process died, perhaps out of memory; {advice}") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_work_of_process: list[Callable[[Any], Any]] = []
"""``work`` of this process."""


def _start_process(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates the processes
    _work_of_process.append(work)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _work_of_process[0](task)
