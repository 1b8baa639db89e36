"""Child processes of the tap: workers and recorder. A crashed child is restarted with exponential backoff.

Setup messages are sent over a socket pair, so that no secret is on a command line or in an environment.
"""

import asyncio
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from tap.ipc.messages import (
    Channel,
    Cut,
    Drain,
    Drained,
    EngineChanged,
    Progress,
    Ready,
    RecorderSetup,
    Refused,
    Reload,
    WorkerSetup,
    WorkerStats,
    log_line,
)
from tap.ipc.sharedmemory import UpstreamBoard
from tap.supervisor.account import Ledger
from tap.supervisor.upstreams import Fleet
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
from wire.process import reap_child, start_child

START_TIMEOUT_S = 120.0
BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
"""Uptime after which the backoff is reset."""
REAP_S = 2.0

_replies = msgspec.msgpack.Decoder(Ready | Refused | Drained | Progress | WorkerStats)


def ignore(_: Any = None) -> None:
    """Ignore a message."""


class RestartingChild:
    """A child process that is restarted after a crash. The channel ends with the process."""

    def __init__(
        self,
        name: str,
        module: str,
        setup: Callable[[], msgspec.Struct],
        pass_fds: Sequence[int] = (),
        *,
        on_message: Callable[[Any], None] = ignore,
        on_death: Callable[[], None] = ignore,
        consequence: str,
    ) -> None:
        """``setup``: returns the first message of each started process.

        ``on_death``: called after a crash, before the restart.
        ``consequence``: the effect until the restart, for the line on stderr.
        """
        self.name = name
        self._module, self._setup, self._pass_fds = module, setup, pass_fds
        self._on_message, self._on_death = on_message, on_death
        self._consequence = consequence
        self._process: subprocess.Popen[bytes] | None = None
        """None: not ready."""
        self._channel = Channel(_replies)
        self._task: asyncio.Task[None] | None = None
        self._deaths = 0
        """Consecutive crashes."""
        self._started_at = 0.0
        self._finishing = self._launching = False
        self.restarts = 0

    @property
    def ready(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child and restart it after crashes. Raises InputError if the child refuses its setup."""
        await self._launch()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, message: Any) -> None:
        """Send a message. A child that is not running gets the content with its next setup."""
        if self.ready:
            self._channel.post(message)

    async def finish(self, timeout_s: float) -> bool:
        if self.ready:
            self._channel.finish()
        return await self.wait_for_exit(timeout_s)

    async def wait_for_exit(self, timeout_s: float) -> bool:
        self._finishing = True
        if self._task is None:
            return True
        if not self.ready and not self._launching:
            self._task.cancel()
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done and self._process is not None:
            self._process.kill()
            await asyncio.wait([self._task], timeout=REAP_S)
        return bool(done)

    async def _launch(self) -> None:
        self._started_at, self._launching = monotonic(), True
        try:
            # Same session as the supervisor: the recorder's scheduling priority counts within a session.
            process, ours = start_child(self._module, self._pass_fds, new_session=False)
            channel = self._channel = await Channel(_replies).attach(ours)
            channel.post(self._setup())
            try:
                await self._until_ready(channel)
            except BaseException:
                channel.close()
                await reap_child(process, REAP_S)
                raise
        finally:
            self._launching = False
        self._process = process
        if self._finishing:  # ready after ``finish``, possibly with exchanges to record
            channel.finish()

    async def _until_ready(self, channel: Channel) -> None:
        """Wait for the first reply. Raises InputError if the child refuses, exits or exceeds the timeout."""
        name = self._module.rpartition(".")[2]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await channel.messages.get()
        except TimeoutError:
            raise InputError(f"the {name} process is not ready after {START_TIMEOUT_S:.0f} s") from None
        if isinstance(reply, Refused):
            raise InputError(reply.reason)
        if not isinstance(reply, Ready):
            raise InputError(f"the {name} process ended before it was ready")

    async def _keep(self) -> None:
        while self._process is not None:
            while (message := await self._channel.messages.get()) is not None:
                self._on_message(message)
            process, self._process = self._process, None
            await reap_child(process, REAP_S)
            if self._finishing:
                return
            self._on_death()
            await self._start_again()

    async def _start_again(self) -> None:
        cause = "died"
        while not self.ready and not self._finishing:
            long_lived = monotonic() - self._started_at > LONG_LIFE_S
            self._deaths = 0 if long_lived else self._deaths + 1
            wait_s = backoff_s(self._deaths)
            log_line(f"the {self.name} process {cause}; {self._consequence}; restarting in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            if self._finishing:
                return
            try:
                await self._launch()
            except InputError as error:
                cause = f"cannot be started ({error})"
            else:
                self.restarts += 1
                log_line(f"the {self.name} process is running again")


def backoff_s(deaths: int) -> float:
    return min(BACKOFF_S * 2.0 ** (deaths - 1), MAX_BACKOFF_S) if deaths else 0.0


WORKER_FLUSH_S = 65.0
"""Time for a drained worker to send its last exchanges: a little more than the worker's flush timeout."""


class Workers:
    """All workers of a tap. Listening sockets stay open here, so that a crashed worker's backlog is not lost."""

    def __init__(self, setup: WorkerSetup, fleet: Fleet, ledger: Ledger, listeners: Sequence[socket.socket]) -> None:
        """``setup``: of the first worker; other workers differ in number and socket."""
        self._setup, self._fleet, self._ledger = setup, fleet, ledger
        self._listeners = listeners
        self._board = UpstreamBoard(setup.folder, setup.board)
        self.cut = 0
        self.stats: dict[int, WorkerStats] = {}
        """Last report of each live worker."""
        self._children = [self._child(number, listener.fileno()) for number, listener in enumerate(listeners)]

    def _child(self, number: int, listen_fd: int) -> RestartingChild:
        return RestartingChild(
            "worker" if len(self._listeners) == 1 else f"worker {number + 1}",
            "tap.proxy.worker",
            lambda: msgspec.structs.replace(
                self._setup, number=number, listen_fd=listen_fd, upstreams=self._fleet.entries()
            ),
            [listen_fd],
            on_message=self._on_message_received,
            on_death=partial(self._crashed, number),
            consequence="its requests are aborted, new requests wait",
        )

    @property
    def ready(self) -> int:
        return sum(child.ready for child in self._children)

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self._children)

    async def start(self) -> None:
        outcomes = await asyncio.gather(*(child.start() for child in self._children), return_exceptions=True)
        for refused in filter(None, outcomes):
            raise refused

    def reload(self) -> None:
        """Send the current upstreams to all workers."""
        for child in self._children:
            child.send(Reload(self._fleet.entries()))

    async def drain(self, drain_s: float, cut_now: "asyncio.Queue[None]") -> None:
        """Wait for requests in flight, for ``drain_s`` or until ``cut_now`` has an entry; then abort them."""
        for listener in self._listeners:
            listener.close()
        for child in self._children:
            child.send(Drain(drain_s))
        leaving = asyncio.create_task(self._wait_for_exit(drain_s + WORKER_FLUSH_S))
        cutting = asyncio.create_task(cut_now.get())
        await asyncio.wait([leaving, cutting], return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        for child in self._children:
            child.send(Cut())
        await leaving
        if self.cut:
            log_line(f"{self.cut} responses were aborted")

    async def _wait_for_exit(self, timeout_s: float) -> None:
        if not all(await asyncio.gather(*(child.wait_for_exit(timeout_s) for child in self._children))):
            log_line("a worker did not exit in time and was killed")

    def _crashed(self, number: int) -> None:
        self._ledger.add_crashed_worker(number)
        self._board.forget_worker(number)
        self.stats.pop(number, None)

    def _on_message_received(self, message: Drained | WorkerStats) -> None:
        if isinstance(message, Drained):
            self.cut += message.cut
        else:
            self.stats[message.worker] = message


class RecorderProcess:
    """The recorder process; its progress is stored in the ledger."""

    def __init__(self, setup: RecorderSetup, ledger: Ledger) -> None:
        self._setup, self.ledger = setup, ledger
        self.last_report_s = monotonic()
        self.child = RestartingChild(
            "recorder",
            "tap.recorder.recorder",
            lambda: self._setup,
            on_message=self._on_message_received,
            on_death=self._crashed,
            consequence="requests are still served; exchanges beyond the memory limit are dropped and counted",
        )

    def engine_changed(self, engine: Engine) -> None:
        meta = msgspec.structs.replace(self._setup.meta, engine=engine)
        self._setup = msgspec.structs.replace(self._setup, meta=meta)
        self.child.send(EngineChanged(engine))

    def _on_message_received(self, progress: Progress) -> None:
        self.ledger.progress, self.last_report_s = progress, monotonic()

    def _crashed(self) -> None:
        settings = msgspec.structs.replace(self._setup.settings, resume=True, overwrite=False)
        self._setup = msgspec.structs.replace(self._setup, settings=settings, carry=self.ledger.progress)
