"""The workers as the supervisor has them: started on their sockets, started again, told of new upstreams, drained."""

import asyncio
import socket
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from engines.facts import EngineFacts
from tap.ipc.control import Cut, Drain, Drained, Reload
from tap.ipc.exchange import Ready, Refused
from tap.supervisor.account import Ledger
from tap.supervisor.childprocess import ChildProcess
from tap.supervisor.config import TapConfig
from tap.supervisor.restarting import Keeper
from tap.supervisor.setups import Runtime, worker_setup
from wire.url import Origin

FLUSH_TIMEOUT_S = 65.0
"""How long a drained worker may take to hand over what is left: somewhat longer than it gives itself."""

_replies = msgspec.msgpack.Decoder(Ready | Refused | Drained)


class Workers:
    """All workers of a tap. Their sockets stay open here, so that what waits at a dead worker's is not lost."""

    def __init__(
        self,
        config: TapConfig,
        facts: EngineFacts,
        runtime: Runtime,
        ledger: Ledger,
        listeners: Sequence[socket.socket],
    ) -> None:
        self._config, self._facts, self._runtime, self._ledger = config, facts, runtime, ledger
        self._listeners = listeners
        self._cut = 0
        self._keepers = [self._keeper(number) for number in range(config.workers)]
        self.upstreams = config.upstreams
        """Where requests go now."""

    def _keeper(self, number: int) -> Keeper:
        return Keeper(
            "worker" if self._config.workers == 1 else f"worker {number + 1}",
            partial(self._start, number),
            on_message=self._drained,
            on_death=partial(self._ledger.worker_died, number),
            consequence="the requests it had are cut, those that come for it wait",
        )

    @property
    def ready(self) -> int:
        """How many take connections."""
        return sum(keeper.ready for keeper in self._keepers)

    @property
    def restarts(self) -> int:
        """How many died and were started again."""
        return sum(keeper.restarts for keeper in self._keepers)

    async def start(self) -> None:
        """Start them all. Raises InputError if one refuses."""
        outcomes = await asyncio.gather(*(keeper.start() for keeper in self._keepers), return_exceptions=True)
        for refused in filter(None, outcomes):
            raise refused

    def reload(self, upstreams: Sequence[Origin]) -> None:
        """Let new requests go to these."""
        self.upstreams = tuple(upstreams)
        for keeper in self._keepers:
            keeper.send(Reload(list(map(str, upstreams))))

    async def drain(self, drain_s: float, cut_now: "asyncio.Queue[None]") -> None:
        """Let what is in flight end, for ``drain_s`` or until there is something in ``cut_now``; then cut it."""
        for listener in self._listeners:
            listener.close()
        for keeper in self._keepers:
            keeper.send(Drain(drain_s))
        leaving = asyncio.create_task(self._left(drain_s + FLUSH_TIMEOUT_S))
        cutting = asyncio.create_task(cut_now.get())
        await asyncio.wait([leaving, cutting], return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        for keeper in self._keepers:
            keeper.send(Cut())
        await leaving
        if self._cut:
            _say(f"{self._cut} responses were cut")

    async def _left(self, timeout_s: float) -> None:
        if not all(await asyncio.gather(*(keeper.left(timeout_s) for keeper in self._keepers))):
            _say("a worker did not leave in time and was killed")

    async def _start(self, number: int) -> ChildProcess:
        listen_fd = self._listeners[number].fileno()
        setup = worker_setup(
            self._config, self._facts, self._runtime, number=number, listen_fd=listen_fd, upstreams=self.upstreams
        )
        return await ChildProcess.start("tap.proxy.worker", setup, _replies, [listen_fd])

    def _drained(self, message: Drained) -> None:
        self._cut += message.cut


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
