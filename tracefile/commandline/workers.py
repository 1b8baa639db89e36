"""Work on every core of this machine; Ray clusters."""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tracefile.commandline.parser import VERSION
from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    import multiprocessing
    from concurrent import futures
    from concurrent.futures import process
else:  # which the flags need not
    multiprocessing = LateModule("multiprocessing")
    futures, process = LateModule("concurrent.futures"), LateModule("concurrent.futures.process")

CONNECT_TIMEOUT_S: Final = 10.0
START_METHOD: Final = "fork" if sys.platform == "linux" else "spawn"
"""A forked process starts in milliseconds and shares the parent's memory. macOS's own libraries do not survive it."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
    try:
        task_of = {pool.submit(_run, task): task for task in tasks}
        for done in futures.as_completed(task_of):
            yield task_of[done], done.result()
    except process.BrokenProcessPool:
        raise InputError("a process of this command died, as for want of memory; expected more, or procs = 1") from None
    except BaseException:
        for child in set(multiprocessing.active_children()) - set(before):
            child.terminate()
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


@contextlib.contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Give ``ray``, connected. Raises InputError if the cluster cannot be reached or Ray is not installed."""
    ray = load_extra("ray", where="--ray: ")
    _require_reachable(address)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--ray: {address}: {reason}; expected the address of a Ray cluster, or auto") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Raise InputError if no server listens: Ray itself would retry for minutes."""
    found = re.fullmatch(r"(\S+):(\d+)", address)
    if found is None or "://" in address:
        return
    try:
        socket.create_connection((found[1], int(found[2])), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"--ray: {address}: {error.strerror or error}; expected the address of a Ray cluster"
        ) from None


def ray_error() -> type[Exception]:
    """Return the class of all errors of Ray's workers."""
    from ray.exceptions import RayError  # noqa: PLC0415 - as above

    error: type[Exception] = RayError
    return error


def ray_fault(error: Exception) -> InputError:
    """Return an error of a Ray worker in one line: usually a machine without this version."""
    reason = str(error).strip().splitlines()[-1]
    return InputError(f"--ray: {reason}; expected kvtape {VERSION} on every machine")


def require_version(theirs: str, where: str) -> None:
    """Raise InputError for another version of kvtape on another machine."""
    if theirs != VERSION:
        raise InputError(f"--ray: {where}: kvtape {theirs}; expected {VERSION}, as here")
