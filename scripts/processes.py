"""Processes of scripts: servers, cores, ports, CPU time (Linux)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Read at import, before this process is pinned to a core.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
START_S = 120.0
STOP_S = 30.0
POLL_S = 0.1
LOG_TAIL_LINES = 30


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    is_ready: Callable[[], bool],
    log: Path,
    title: str = "the server",
    *,
    environment: Mapping[str, str] | None = None,
    core: int | None = None,
    start_s: float = START_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server within the ``with`` block, after it is ready; exit with the end of its log if it fails.

    ``log`` has its output. ``core``: core of the server and its children; None: the cores of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, on_core(core):
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + start_s
        while not is_ready():
            if server.poll() is not None:
                sys.exit(f"{title} ended with status {server.returncode}; the end of {log}:\n{tail(log)}")
            if time.monotonic() > deadline:
                sys.exit(f"{title} was not ready after {start_s:.0f} s; see {log}")
            time.sleep(POLL_S)
        yield server
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def measuring_cores() -> tuple[int | None, int | None]:
    """Return a core for the load and a core for the engine; None with a single core, or without affinity."""
    return (CORES[-1], CORES[0]) if len(CORES) > 1 else (None, None)


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Run on a core within the ``with`` block; started processes inherit the affinity, which is restored at the end."""
    if core not in CORES:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(pid: int, core: int) -> None:
    """Pin every thread of a process to a core, if this process may use it."""
    if core in CORES:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, from the kernel's scheduler statistics."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def machine_busy_ns() -> int:
    """Return the CPU time of all processes of the machine, in clock ticks of resolution."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def child_named(pid: int, words: str) -> int:
    """Wait for the first descendant of a process whose command line contains ``words``; return its pid."""
    while True:
        for child in children(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if words in Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    return child
        time.sleep(POLL_S)


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    try:
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return direct + [descendant for child in direct for descendant in children(child)]
