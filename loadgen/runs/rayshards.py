"""A run's shards on the machines of a Ray cluster (``--ray ADDRESS``): the same shards behind the same messages.

Each machine's wall clock is compared with this one's before the start, and t = 0 is sent in its own time. Then each
shard uses its machine's monotonic clock; at the end the wall clocks are compared again for the header.
"""

import asyncio
import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.runs.shardmessages import Failed, FromParent, FromShard, Setup
from loadgen.runs.shards import CORES_A_SHARD, ClockOffset, Hear, Host, ShardProcess
from tracefile import InputError
from tracefile.commandline.parser import VERSION
from tracefile.commandline.workers import ray_cluster, ray_error, ray_fault, require_version

PART = "part.jsonl"
START_TIMEOUT_S = 120.0
"""Longest start of an actor, which may need a new worker."""
CLOCK_QUESTIONS = 10
CHUNK_BYTES = 4 << 20


@contextlib.contextmanager
def ray_host(address: str) -> Iterator[Host]:
    """Machines of a cluster; raises InputError if it cannot be reached, or Ray is not installed."""
    with ray_cluster(address) as ray:
        actor_class = ray.remote(num_cpus=CORES_A_SHARD, scheduling_strategy="SPREAD")(ShardActor)
        yield Host(partial(RayShard.start, actor_class.remote), int(ray.cluster_resources().get("CPU", 0)), apart=True)


class RayShard:
    """Shard in a Ray actor."""

    def __init__(self, actor: Any, where: str, clock: ClockOffset, hear: Hear) -> None:
        self.where = where
        self.clock: ClockOffset | None = clock
        self._actor = actor
        self._hear = hear
        self._hearing = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, actor_of: Callable[[], Any], hear: Hear) -> "RayShard":
        """Raises InputError if the cluster cannot, or has another kvtape version."""
        actor = actor_of()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                where, theirs = await actor.start.remote()
                clock = await measured_offset(actor.clock.remote)
        except TimeoutError:
            raise InputError(
                f"--ray: no actor after {START_TIMEOUT_S:.0f} s; expected free cores in the cluster"
            ) from None
        except ray_error() as error:
            raise ray_fault(error) from None
        require_version(theirs, where)
        return cls(actor, where, clock, hear)

    def send(self, message: FromParent) -> None:
        self._actor.send.remote(message)

    async def fetch_part(self, part: Path) -> None:
        """Copy its part here, and measure its clock again."""
        with part.open("wb") as file, contextlib.suppress(ray_error()):
            while piece := await self._actor.read.remote(file.tell(), CHUNK_BYTES):
                file.write(piece)
            self.clock = await measured_offset(self._actor.clock.remote)

    def kill(self) -> None:
        self._actor.kill.remote()

    async def close(self) -> None:
        self._hearing.cancel()
        with contextlib.suppress(ray_error()):
            await self._actor.close.remote()

    async def _listen(self) -> None:
        try:
            while True:
                for message in await self._actor.hear.remote():
                    self._hear(message)
        except ray_error() as error:
            reason = str(error).strip().splitlines()[0]
            self._hear(Failed(f"{self.where}: its Ray actor is gone: {reason}", is_input=False))


async def measured_offset(
    their_clock: Callable[[], Awaitable[int]], clock: Callable[[], int] = time.time_ns
) -> ClockOffset:
    """Offset of another wall clock, by the exchange with the shortest round trip."""
    best: ClockOffset | None = None
    for _ in range(CLOCK_QUESTIONS):
        before_ns = clock()
        theirs_ns = await their_clock()
        after_ns = clock()
        if best is None or after_ns - before_ns < best.round_trip_ns:
            best = ClockOffset(theirs_ns - (before_ns + after_ns) // 2, after_ns - before_ns)
    assert best is not None  # it was asked
    return best


class ShardActor:
    """Shard process and its part of the trace, kept on this machine until it is fetched."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtape-shard-")
        self._said: asyncio.Queue[FromShard] = asyncio.Queue()
        self._shard: ShardProcess | None = None

    async def start(self) -> tuple[str, str]:
        self._shard = await ShardProcess.start(self._said.put_nowait)
        return f"{platform.node()}, {self._shard.where}", VERSION

    async def clock(self) -> int:
        return time.time_ns()

    async def send(self, message: FromParent) -> None:
        assert self._shard is not None  # started first
        if isinstance(message, Setup):
            message = replace(message, trace=self._part(), overwrite=True)
        self._shard.send(message)

    async def hear(self) -> list[FromShard]:
        """Wait for messages; return all since the last call."""
        messages = [await self._said.get()]
        while not self._said.empty():
            messages.append(self._said.get_nowait())
        return messages

    async def read(self, offset: int, size: int) -> bytes:
        """A piece of the part; empty behind its end, or without a part."""
        if not self._part().exists():
            return b""
        with self._part().open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    async def kill(self) -> None:
        if self._shard is not None:
            self._shard.kill()

    async def close(self) -> None:
        if self._shard is not None:
            await self._shard.close()
        self._folder.cleanup()

    def _part(self) -> Path:
        return Path(self._folder.name) / PART
