"""Cost of processes: CPU time to the nanosecond, memory, cores. Linux only."""

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

START_S = 30.0
CORES = os.sched_getaffinity(0)
"""Those that this run was given."""


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process so far, from the scheduler's own account."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def rss_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def children(pid: int) -> list[int]:
    """A process's children and theirs."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return own + [below for child in own for below in children(child)]


def named(pids: Iterable[int], words: str) -> list[int]:
    """Processes with ``words`` in their command line."""
    found = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words in command:
            found.append(pid)
    return found


def pin(pid: int, core: int) -> None:
    """Keep every thread of a process on one core, where this run may use it."""
    if core in CORES:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def machine_busy_ns() -> int:
    """CPU time that all processes of the machine have had together, to the clock tick."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_listening(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until somebody listens on the port; raise RuntimeError if the process ends before."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"{process.args!r} did not start to listen on {port}")


async def child_named(pid: int, words: str) -> int:
    """The first of a process's children, or of theirs, whose command line holds ``words``, waited for."""
    while not (found := named(children(pid), words)):  # noqa: ASYNC110  another process's children
        await asyncio.sleep(0.02)
    return found[0]


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    while not ended(pid):  # noqa: ASYNC110  not a child of ours
        await asyncio.sleep(0.01)


def ended(pid: int) -> bool:
    """Return whether a process has ended, collected by its parent or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
