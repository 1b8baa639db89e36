"""The supervisor's side of its children: the workers, the recorder and the admin process."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from engines.facts import EngineFacts
from tap.ipc.exchange import (
    AdminSetup,
    Cut,
    Drain,
    Drained,
    EngineChanged,
    Progress,
    Ready,
    RecorderSetup,
    Refused,
    Reload,
    ServiceStats,
)
from tap.ipc.stderr import say
from tap.supervisor.account import Ledger
from tap.supervisor.config import Runtime, TapConfig, board_size, dialect, worker_setup
from tap.supervisor.fleet import Fleet
from tap.supervisor.restarting import ChildProcess, RestartingChild
from tap.supervisor.upstreamlist import UpstreamList
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Engine

WORKER_FLUSH_S = 65.0
"""Time for a drained worker to hand over its last exchanges: a little more than it gives itself."""
STATS_INTERVAL_S = 1.0
ADMIN_LEAVE_S = 5.0

_replies = msgspec.msgpack.Decoder(Ready | Refused | Drained | Progress)


class Workers:
    """All workers of a tap. Their sockets stay open here, so connections that wait at a dead worker are not lost."""

    def __init__(
        self,
        config: TapConfig,
        facts: EngineFacts,
        runtime: Runtime,
        ledger: Ledger,
        *,
        key: HashKey,
        listeners: Sequence[socket.socket],
    ) -> None:
        self._config, self._facts, self._runtime, self._ledger = config, facts, runtime, ledger
        self._key = key
        self._listeners = listeners
        self._cut = 0
        self._children = [self._child(number) for number in range(config.workers)]
        self._board_size = board_size(config, facts)
        listed = UpstreamList(config.upstreams, config.draining, config.stopped)
        spoken = config.dialect if config.inject_auto else dialect(config, facts)
        self.fleet = Fleet(listed, self._board_size.slots, spoken)
        self._board = runtime.map_board(self._board_size)

    def _child(self, number: int) -> RestartingChild:
        return RestartingChild(
            "worker" if self._config.workers == 1 else f"worker {number + 1}",
            partial(self._start, number),
            on_message=self._drained,
            on_death=partial(self._died, number),
            consequence="its requests are cut, new ones wait",
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

    def reload(self, *, certificate: bool = False) -> None:
        """Send the fleet as it is now to all workers."""
        for child in self._children:
            child.send(Reload(self.fleet.entries(), certificate))

    async def drain(self, drain_s: float, cut_now: "asyncio.Queue[None]") -> None:
        """Let requests in flight end, for ``drain_s`` or until ``cut_now`` has an entry; then cut them."""
        for listener in self._listeners:
            listener.close()
        for child in self._children:
            child.send(Drain(drain_s))
        leaving = asyncio.create_task(self._left(drain_s + WORKER_FLUSH_S))
        cutting = asyncio.create_task(cut_now.get())
        await asyncio.wait([leaving, cutting], return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        for child in self._children:
            child.send(Cut())
        await leaving
        if self._cut:
            say(f"{self._cut} responses were cut")

    async def _left(self, timeout_s: float) -> None:
        if not all(await asyncio.gather(*(child.left(timeout_s) for child in self._children))):
            say("a worker did not leave in time and was killed")

    async def _start(self, number: int) -> ChildProcess:
        listen_fd = self._listeners[number].fileno()
        setup = worker_setup(
            *(self._config, self._key, self._facts, self._runtime),
            number=number,
            listen_fd=listen_fd,
            upstreams=self.fleet.entries(),
            board=self._board_size,
        )
        return await ChildProcess.start("tap.proxy.worker", setup, _replies, [listen_fd])

    def _died(self, number: int) -> None:
        self._ledger.worker_died(number)
        self._board.forget_worker(number)

    def _drained(self, message: Drained) -> None:
        self._cut += message.cut


class RecorderProcess:
    """The recorder; its counts go into the ledger as they arrive."""

    def __init__(self, setup: RecorderSetup, ledger: Ledger) -> None:
        self._setup, self._ledger = setup, ledger
        self.child = RestartingChild(
            "recorder",
            self._start,
            on_message=self._heard,
            on_death=self._died,
            consequence="serving goes on; exchanges that find no room until it is back are dropped and counted",
        )

    def engine_changed(self, engine: Engine) -> None:
        meta = msgspec.structs.replace(self._setup.meta, engine=engine)
        self._setup = msgspec.structs.replace(self._setup, meta=meta)
        self.child.send(EngineChanged(engine))

    async def _start(self) -> ChildProcess:
        return await ChildProcess.start("tap.recorder.recorder", self._setup, _replies)

    def _heard(self, progress: Progress) -> None:
        self._ledger.progress = progress

    def _died(self) -> None:
        self._setup = msgspec.structs.replace(self._setup, resume=True, overwrite=False, carry=self._ledger.progress)


class AdminProcess:
    """The admin process, told once a second how the tap stands."""

    def __init__(self, config: TapConfig, listener: socket.socket, runtime: Runtime) -> None:
        self._listener = listener
        hosts = [] if config.admin is None else [config.admin[0].lower()]
        self._setup = AdminSetup(
            listen_fd=listener.fileno(),
            feed_socket=runtime.admin_socket,
            trace=config.trace,
            names=[socket.gethostname().lower(), *hosts, *config.admin_names],
        )
        self._child = RestartingChild("admin", self._start, consequence="no pages and metrics, all else goes on")
        self._telling: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def start(self, stats: Callable[[], ServiceStats]) -> None:
        await self._child.start()
        self._telling = asyncio.create_task(self._tell(stats))

    def tell(self, stats: ServiceStats) -> None:
        self._child.offer(stats)

    async def finish(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._listener.close()
        await self._child.finish(ADMIN_LEAVE_S)

    async def _tell(self, stats: Callable[[], ServiceStats]) -> None:
        while True:
            self.tell(stats())
            await asyncio.sleep(STATS_INTERVAL_S)

    async def _start(self) -> ChildProcess:
        return await ChildProcess.start("tap.admin", self._setup, _replies, [self._setup.listen_fd])
