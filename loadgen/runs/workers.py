"""Workers of a run, driven by their parent: all ready, one common t = 0, all ended, also if one dies."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from loadgen.runs.messages import (
    Done,
    Failed,
    FromParent,
    FromWorker,
    Go,
    Progress,
    Ready,
    Setup,
    Stop,
    decode,
    encode,
)
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from wire.process import FrameSocket, child_left, reap_child, start_child

MODULE = "loadgen.runs.worker"
HEAD_START_S = 0.1
"""From ``Go`` to t = 0: time to build the first prompts."""
LEAVE_S = 5.0
"""Maximum time to exit after the last message."""

OnMessage = Callable[[FromWorker], None]


class WorkerLink(Protocol):
    """Worker on any machine."""

    where: str
    ahead_ns: int | None
    """The worker's wall clock minus the local clock; null: a local worker."""

    def send(self, message: FromParent) -> None:
        """Send a message; ignored if the worker is gone."""

    async def fetch_part(self, part: Path) -> None:
        """Copy its records to ``part`` on this machine."""

    def kill(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """Machines that run workers."""

    start: Callable[[OnMessage], Awaitable[WorkerLink]]
    """Starts a worker; the callable gets its messages."""
    cores: int
    apart: bool
    """True if workers may run on other machines, so that their traces must be fetched."""


class Workers:
    """All workers of a run: ``ready``, then ``go``, then ``ended``; ``stop`` and ``kill`` at any time."""

    def __init__(self, count: int, host: Host) -> None:
        self._count = count
        self._host = host
        self._inbox: asyncio.Queue[tuple[int, FromWorker]] = asyncio.Queue()
        self.links: list[WorkerLink] = []
        self.stopping: str | None = None
        self.going = False

    async def __aenter__(self) -> "Workers":
        starting = [asyncio.ensure_future(self._host.start(self._on_message(index))) for index in range(self._count)]
        try:
            self.links += await asyncio.gather(*starting)
        except BaseException:
            started = await asyncio.gather(*starting, return_exceptions=True)
            self.links += [link for link in started if not isinstance(link, BaseException)]
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(link.close() for link in self.links))

    async def ready(self, setups: Sequence[Setup]) -> list[Ready]:
        for link, setup in zip(self.links, setups, strict=True):
            link.send(setup)
        result: dict[int, Ready] = {}
        while len(result) < self._count:
            index, message = await self._inbox.get()
            if isinstance(message, Failed):
                raise InputError(message.text if message.is_input else f"worker {index}: {message.text}")
            assert isinstance(message, Ready)
            result[index] = message
        return [result[index] for index in range(self._count)]

    def go(self, meta: Meta) -> tuple[int, Meta]:
        """Start all workers at one t = 0; return it on ``perf_counter_ns``, and the header with its epoch."""
        head_start_ns = int(HEAD_START_S * 1e9)
        at_ns, unix_ns = time.perf_counter_ns() + head_start_ns, time.time_ns() + head_start_ns
        for link in self.links:
            theirs_ns = unix_ns + (link.ahead_ns or 0)
            header = msgspec.structs.replace(meta, epoch_unix_ns=theirs_ns)
            link.send(Go(at_ns if link.ahead_ns is None else None, theirs_ns, header))
        self.going = True
        return at_ns, msgspec.structs.replace(meta, epoch_unix_ns=unix_ns)

    async def ended(self, on_message: Callable[[int, Progress | Done | Failed], None]) -> list[Done | Failed]:
        """Wait for all last messages; stop all workers if one ends early. ``on_message`` gets every message."""
        last: dict[int, Done | Failed] = {}
        while len(last) < self._count:
            index, message = await self._inbox.get()
            assert isinstance(message, Progress | Done | Failed)
            if index in last:  # its end after the last message adds nothing
                continue
            on_message(index, message)
            if isinstance(message, Done | Failed):
                last[index] = message
                reason = "worker failed" if isinstance(message, Failed) else message.stopped
                if reason is not None:
                    self.stop(reason)
        return [last[index] for index in range(self._count)]

    async def fetch(self, parts: Sequence[Path]) -> None:
        """Copy every worker's trace to this machine."""
        await asyncio.gather(*(link.fetch_part(part) for link, part in zip(self.links, parts, strict=True)))

    def stop(self, reason: str) -> None:
        if self.stopping is None:
            self.stopping = reason
            for link in self.links:
                link.send(Stop(reason))

    def kill(self) -> None:
        for link in self.links:
            link.kill()

    def _on_message(self, index: int) -> OnMessage:
        return lambda message: self._inbox.put_nowait((index, message))


class WorkerProcess:
    """Local worker. ``on_message`` gets its messages, and a ``Failed`` if it ended without a last message."""

    ahead_ns: int | None = None

    def __init__(self, process: "subprocess.Popen[bytes]", on_message: OnMessage) -> None:
        self.where = f"process {process.pid}"
        self._process = process
        self._on_message = on_message
        self._socket: FrameSocket | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def start(cls, on_message: OnMessage, module: str = MODULE) -> "WorkerProcess":
        process, ours = start_child(module)
        worker = cls(process, on_message)
        worker._socket = await FrameSocket(worker._receive, worker._end).attach(ours)
        return worker

    def send(self, message: FromParent) -> None:
        if self._socket is not None:
            self._socket.send(encode(message))

    async def fetch_part(self, part: Path) -> None:
        """Nothing to do: the part is local."""

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        if self._reporting is not None:
            self._reporting.cancel()
        await reap_child(self._process, LEAVE_S)

    def _receive(self, payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, FromWorker)
        self._on_message(message)

    def _end(self) -> None:
        if not self._closing:
            self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        await child_left(self._process, LEAVE_S)
        self._on_message(Failed(f"{self.where} {exit_text(self._process.poll())}", is_input=False))


def exit_text(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
