"""Harm that one hostile client or upstream does to everybody else, through the tap and through nginx.

    python -m scripts.bench_hostile            # under three minutes
    python -m scripts.bench_hostile --quick    # a tenth of each payload
    python -m scripts.bench_hostile --only chunks,1xx

Per actor: other clients' added wait for a small request due every 5 ms, the data plane's CPU seconds, the peak memory
of each process of the tap. Exit code 1: the added p99 is above 20 ms and above nginx's, or a process outgrew
docs/before-production.md. On two cores an actor also takes time from the client that measures: nginx's row shows how
much.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from scripts.proxybench.hostile import ACTORS, PATIENCE_S, PROBE, act, connected, in_process, serve
from scripts.proxybench.processes import CORES, cpu_ns, free_port, pin, rss_mb
from scripts.proxybench.proxies import LOAD_CORE, PROXY_CORE, binary, nginx
from scripts.proxybench.tapprocess import ROLES, running_tap
from wire.loop import run

PERIOD_S = 0.005
QUIET_S = 0.5
MAX_ADDED_MS = 20.0
QUEUE_MB = 64
SLACK = 1.1
SIZES_MB = {"tap": 60, "worker": 50 + QUEUE_MB, "recorder": 40 + 150 + QUEUE_MB, "admin": 110}
"""docs/before-production.md, Sizing."""
FULL_MB, QUICK_MB = 20.0, 2.0
"""Size of a payload; trailers, trailer lines and the gzip bomb are three times that."""


@dataclass(slots=True)
class Target:
    """A proxy under attack."""

    name: str
    port: int
    data_plane: int
    roles: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Harm:
    """Harm of an actor to others."""

    actor: str
    proxy: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    """Of the wait beyond the median before the actor began."""
    cpu_s: float
    peak_mb: dict[str, float]
    allowed_ms: float = MAX_ADDED_MS

    @property
    def problems(self) -> list[str]:
        """What the tap missed."""
        found = [f"p99 {self.p99_ms:.0f} ms"] if self.p99_ms > self.allowed_ms else []
        found += [f"{role} {mb:.0f} MB" for role, mb in self.peak_mb.items() if mb > SLACK * SIZES_MB[role]]
        return found if self.proxy == "tap" else []


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="a tenth of each payload: a look, not a result")
    made.add_argument("--only", default="", metavar="LIST", help="actors with one of these words in their name")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    return made


class Probe:
    """Another client: a small request every few milliseconds, each wait counted from when it was due."""

    def __init__(self, target: Target) -> None:
        self._sock = connected(target.port)
        self._target = target
        self.peak_mb = dict.fromkeys(target.roles, 0.0)

    def waits_ms(self, until: float, process: object = None) -> list[float]:
        """Ask until that time, or until the actor's process has ended."""
        waits: list[float] = []
        due = time.monotonic()
        while due < until and (process is None or process.is_alive()):  # type: ignore[attr-defined]
            time.sleep(max(0.0, due - time.monotonic()))
            self._ask()
            waits.append(1e3 * (time.monotonic() - due))
            due += PERIOD_S
            if len(waits) % 10 == 0:
                self._sample()
        return waits

    def _ask(self) -> None:
        try:
            self._sock.sendall(PROBE)
            if not self._sock.recv(PIECE_BYTES):
                raise ConnectionError
        except (ConnectionError, TimeoutError):
            self._sock.close()
            self._sock = connected(self._target.port)

    def _sample(self) -> None:
        for role, pids in self._target.roles.items():
            with contextlib.suppress(OSError):
                self.peak_mb[role] = max(self.peak_mb[role], *(rss_mb(pid) for pid in pids))


PIECE_BYTES = 1 << 16


def attack(target: Target, actor: str, upstream: int, mb: float) -> Harm:
    """Ask quietly, then beside the actor."""
    probe = Probe(target)
    probe.waits_ms(time.monotonic() + QUIET_S)
    quiet = float(np.median(probe.waits_ms(time.monotonic() + QUIET_S)))
    before = cpu_ns(target.data_plane)
    process = in_process(act, actor, upstream if "/metrics" in actor else target.port, mb)
    waits = np.array(probe.waits_ms(time.monotonic() + 3 * PATIENCE_S, process)) - quiet
    process.kill()
    process.join()
    p50, p99 = np.percentile(waits, [50, 99])
    cpu_s = (cpu_ns(target.data_plane) - before) / 1e9
    return Harm(actor, target.name, float(p50), float(p99), float(waits.max()), cpu_s, probe.peak_mb)


@contextlib.asynccontextmanager
async def target_up(name: str, folder: Path, upstream: int) -> AsyncIterator[Target]:
    """A proxy of its own for each attack: memory that one leaves behind is not the next one's."""
    if name == "nginx":
        async with nginx(folder, upstream) as proxy:
            assert proxy.pid is not None
            yield Target(name, proxy.port, proxy.pid)
        return
    flags = ["--tokenizer", "bytes", "--queue-mb", str(QUEUE_MB), "--engine-metrics-interval", "500ms"]
    async with running_tap(folder, upstream, [*flags, "--admin", f"127.0.0.1:{free_port()}"]) as tap:
        await tap.pid("admin")
        await tap.pid("recorder")
        roles = {role: tap.pids(role) for role in ("tap", *ROLES)}
        for role, pids in roles.items():
            for pid in pids:
                pin(pid, PROXY_CORE if role == "worker" else LOAD_CORE)
        yield Target("tap", tap.port, tap.data_plane, roles)


async def bench(args: argparse.Namespace) -> list[Harm]:
    """Let every actor at every proxy."""
    mb = QUICK_MB if args.quick else FULL_MB
    words = args.only.split(",")
    names = ["nginx", "tap"] if binary("nginx") else ["tap"]
    harms: list[Harm] = []
    for actor in [actor for actor in ACTORS if any(word in actor for word in words)]:
        size = mb * (3 if "trailer" in actor or "gzip" in actor else 1)
        for name in names:
            upstream = free_port()
            server = in_process(serve, upstream, size)
            with tempfile.TemporaryDirectory(prefix="bench-hostile-") as folder:
                await asyncio.to_thread(wait_for, upstream)
                async with target_up(name, Path(folder), upstream) as target:
                    harm = await asyncio.to_thread(attack, target, actor, upstream, size)
            server.kill()
            server.join()
            beside = [other.p99_ms for other in harms if other.actor == actor]
            harms.append(replace(harm, allowed_ms=max(MAX_ADDED_MS, *beside, 0.0)))
            print(line(harms[-1]), flush=True)
    return harms


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), connected(port):
            return
        time.sleep(0.05)


COLUMNS = ("actor", "proxy", "added p50", "p99", "max ms", "CPU s", "supervisor", "worker", "recorder", "admin MB", "")


def line(harm: Harm) -> str:
    """A row of the table."""
    memory = [f"{harm.peak_mb[role]:.0f}" if role in harm.peak_mb else "" for role in ("tap", *ROLES)]
    waits = [f"{value:.1f}" for value in (harm.p50_ms, harm.p99_ms, harm.max_ms)]
    verdict = ("MISSED: " + ", ".join(harm.problems)) if harm.problems else "holds" if harm.proxy == "tap" else ""
    return row([harm.actor, harm.proxy, *waits, f"{harm.cpu_s:.2f}", *memory, verdict])


def row(cells: Sequence[str]) -> str:
    """Cells in columns."""
    first, second, *rest = cells
    return "  ".join([first.ljust(30), second.ljust(5), *(cell.rjust(10) for cell in rest)]).rstrip()


def main(argv: Sequence[str]) -> int:
    """Print the table; exit code 1 where the tap missed a limit."""
    args = parser().parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if LOAD_CORE in CORES:
        os.sched_setaffinity(0, {LOAD_CORE})
    print(row(COLUMNS))
    harms = run(bench(args))
    if args.json is not None:
        args.json.write_text(
            json.dumps([{**asdict(harm), "problems": harm.problems} for harm in harms], indent=1) + "\n"
        )
    return int(any(harm.problems for harm in harms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
