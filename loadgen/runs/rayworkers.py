"""Workers of a run on the machines of a Ray cluster (``--ray ADDRESS``): same workers, same messages.

Each machine's wall clock is compared with the local clock before the start, and t = 0 is sent in its time.
"""

import asyncio
import contextlib
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.runs.messages import Failed, FromParent, FromWorker, Setup
from loadgen.runs.workers import Host, OnMessage, WorkerProcess
from tracefile.commandline.parser import VERSION
from tracefile.commandline.workers import ray_cluster, ray_error, ray_fault, require_version
from tracefile.records.errors import InputError

START_TIMEOUT_S = 120.0
"""Maximum start time of an actor, which may need a new worker."""
CLOCK_SAMPLES = 10


@contextlib.contextmanager
def ray_host(address: str) -> Iterator[Host]:
    """Machines of a cluster. Raises InputError if it cannot be reached, or Ray is not installed."""
    with ray_cluster(address) as ray:
        actor_class = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(WorkerActor)
        yield Host(partial(RayWorker.start, actor_class.remote), int(ray.cluster_resources().get("CPU", 0)), apart=True)


class RayWorker:
    """Worker behind a Ray actor."""

    def __init__(self, actor: Any, where: str, ahead_ns: int, on_message: OnMessage) -> None:
        self.where = where
        self.ahead_ns: int | None = ahead_ns
        self._actor = actor
        self._on_message = on_message
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, actor_of: Callable[[], Any], on_message: OnMessage) -> "RayWorker":
        """Raises InputError if the cluster cannot start it, or has another kvtape version."""
        actor = actor_of()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                where, version = await actor.start.remote()
                ahead_ns = await clock_ahead_ns(actor.clock.remote)
        except TimeoutError:
            raise InputError(
                f"--ray: no actor after {START_TIMEOUT_S:.0f} s; expected free cores in the cluster"
            ) from None
        except ray_error() as error:
            raise ray_fault(error) from None
        require_version(version, where)
        return cls(actor, where, ahead_ns, on_message)

    def send(self, message: FromParent) -> None:
        self._actor.send.remote(message)

    async def fetch_part(self, part: Path) -> None:
        with contextlib.suppress(ray_error()):
            records = await self._actor.read.remote()
            await asyncio.to_thread(part.write_bytes, records)

    def kill(self) -> None:
        self._actor.kill.remote()

    async def close(self) -> None:
        self._listening.cancel()
        with contextlib.suppress(ray_error()):
            await self._actor.close.remote()

    async def _listen(self) -> None:
        try:
            while True:
                self._on_message(await self._actor.receive.remote())
        except ray_error() as error:
            reason = str(error).strip().splitlines()[0]
            self._on_message(Failed(f"{self.where}: its Ray actor is gone: {reason}", is_input=False))


async def clock_ahead_ns(their_clock: Callable[[], Awaitable[int]], clock: Callable[[], int] = time.time_ns) -> int:
    """Return the offset of another wall clock from the local clock, by the exchange with the lowest latency.

    The error is at most half of its round trip.
    """
    offsets: list[tuple[int, int]] = []
    for _ in range(CLOCK_SAMPLES):
        before_ns = clock()
        theirs_ns = await their_clock()
        after_ns = clock()
        offsets.append((after_ns - before_ns, theirs_ns - (before_ns + after_ns) // 2))
    return min(offsets)[1]


class WorkerActor:
    """Worker process and its part of the trace, stored on its machine until it is fetched."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtape-worker-")
        self._part = Path(self._folder.name) / "part.jsonl"
        self._messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._worker: WorkerProcess | None = None

    async def start(self) -> tuple[str, str]:
        self._worker = await WorkerProcess.start(self._messages.put_nowait)
        return f"{platform.node()}, {self._worker.where}", VERSION

    async def clock(self) -> int:
        return time.time_ns()

    async def send(self, message: FromParent) -> None:
        assert self._worker is not None  # started first
        self._worker.send(replace(message, trace=self._part) if isinstance(message, Setup) else message)

    async def receive(self) -> FromWorker:
        """Wait for the worker's next message."""
        return await self._messages.get()

    async def read(self) -> bytes:
        return self._part.read_bytes() if self._part.exists() else b""

    async def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
        self._folder.cleanup()
