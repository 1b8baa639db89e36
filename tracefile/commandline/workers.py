"""Work on every core of this machine, or of a Ray cluster: results come as tasks end, and are the same on both."""

import argparse
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
    from concurrent.futures import Future, ProcessPoolExecutor, process
else:  # which the flags need not
    multiprocessing = LateModule("multiprocessing")
    futures, process = LateModule("concurrent.futures"), LateModule("concurrent.futures.process")

CONNECT_TIMEOUT_S: Final = 10.0
TASKS_A_CORE: Final = 2
"""Tasks handed over for each core: the next one is there when one ends."""

Task = TypeVar("Task")
Result = TypeVar("Result")
_Submit = Callable[[Any], Any]
_FirstDone = Callable[[Sequence[Any]], tuple[Any, Any]]
"""Returns a handle of a task that has ended, and its result."""


def add_worker_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the processes or the cluster of ``results``."""
    parser.add_argument("--procs", type=int, help="processes here (default: one per core)")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on this Ray cluster, such as head:6379; auto: this machine's cluster"
    )


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def results(
    work: Callable[[Task], Result], tasks: Sequence[Task], *, procs: int | None = None, ray: str | None = None
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result, in the order in which they end.

    ``work`` is pickled once for each process, ``ray``: once for the cluster. ``procs``: processes here, None: one per
    core. Raises InputError if the cluster cannot be reached or a process dies.
    """
    procs = min(procs or usable_cores(), len(tasks))
    if ray is not None:
        with ray_cluster(ray) as cluster:
            yield from _in_turn(tasks, *_on_ray(cluster, work), int(cluster.cluster_resources().get("CPU", 1)))
    elif procs < 2:
        yield from ((task, work(task)) for task in tasks)
    else:
        with _processes(procs, work) as pool:
            yield from _in_turn(tasks, lambda task: pool.submit(_run, task), _first_future, procs)


def _in_turn(tasks: Sequence[Task], submit: _Submit, first_done: _FirstDone, cores: int) -> Iterator[tuple[Task, Any]]:
    """Keep every core busy and no more than that handed over, so that an interrupt has little to wait for."""
    ahead, task_of = iter(tasks), {}
    while True:
        for task in ahead:
            task_of[submit(task)] = task
            if len(task_of) >= TASKS_A_CORE * cores:
                break
        if not task_of:
            return
        handle, result = first_done(list(task_of))
        yield task_of.pop(handle), result


@contextlib.contextmanager
def _processes(count: int, work: Callable[[Any], Any]) -> "Iterator[ProcessPoolExecutor]":
    """Processes that end with this one, even if it is killed. Not forked: threads of numba do not survive it."""
    pool = futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_hold, initargs=(work,))
    before = multiprocessing.active_children()
    try:
        yield pool
    except process.BrokenProcessPool:
        raise InputError("a process of this command died, as for want of memory; expected more, or --procs 1") from None
    except BaseException:
        for child in set(multiprocessing.active_children()) - set(before):
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _first_future(running: Sequence["Future[Any]"]) -> tuple["Future[Any]", Any]:
    done = next(iter(futures.wait(running, return_when=futures.FIRST_COMPLETED).done))
    return done, done.result()


_held: dict[Any, Callable[[Any], Any]] = {}
"""Work of this process; of a Ray worker by reference, as it may serve several commands."""


def _hold(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    _held[None] = work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _held[None](task)


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


def _on_ray(ray: Any, work: Callable[[Any], Any]) -> tuple[_Submit, _FirstDone]:
    held, remote = ray.put(work), ray.remote(num_cpus=1)(_run_on_ray)

    def first_done(handles: Sequence[Any]) -> tuple[Any, Any]:
        (done,), _ = ray.wait(handles)
        try:
            (theirs, where), result = ray.get(done)
        except ray_error() as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, InputError) else ray_fault(error)) from None
        require_version(theirs, where)
        return done, result

    return lambda task: remote.remote([held], task), first_done


def _run_on_ray(reference: list[Any], task: Any) -> tuple[tuple[str, str], Any]:
    """Run a task on a Ray worker, which fetches the work once; in a list it comes as a reference."""
    import ray  # noqa: PLC0415 - as above

    if reference[0] not in _held:
        _held.clear()
        _held[reference[0]] = ray.get(reference[0])
    return (VERSION, os.uname().nodename), _held[reference[0]](task)
