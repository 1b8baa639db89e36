"""The supervisor's side of the admin process: started with its socket, told once a second how the tap stands."""

import asyncio
import socket
from collections.abc import Callable

import msgspec

from tap.ipc.admincontrol import AdminSetup, ServiceStats
from tap.ipc.exchange import Ready, Refused
from tap.supervisor.childprocess import ChildProcess
from tap.supervisor.restarting import Keeper

STATS_INTERVAL_S = 1.0
LEAVE_S = 5.0

_replies = msgspec.msgpack.Decoder(Ready | Refused)


class AdminProcess:
    """The admin process that there is to be."""

    def __init__(self, listener: socket.socket, feed_socket: str, trace: str, block_size: int) -> None:
        self._listener = listener
        self._setup = AdminSetup(
            listen_fd=listener.fileno(), feed_socket=feed_socket, trace=trace, block_size=block_size
        )
        self._keeper = Keeper("admin", self._start, consequence="pages and metrics are away, all else goes on")
        self._telling: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where its pages are."""
        return int(self._listener.getsockname()[1])

    async def start(self, stats: Callable[[], ServiceStats]) -> None:
        """Start it, and go on telling it ``stats``. Raises InputError if it refuses."""
        await self._keeper.start()
        self._telling = asyncio.create_task(self._tell(stats))

    def tell(self, stats: ServiceStats) -> None:
        """Tell it now."""
        self._keeper.offer(stats)

    async def finish(self) -> None:
        """Let it leave."""
        if self._telling is not None:
            self._telling.cancel()
        self._listener.close()
        await self._keeper.finish(LEAVE_S)

    async def _tell(self, stats: Callable[[], ServiceStats]) -> None:
        while True:
            self.tell(stats())
            await asyncio.sleep(STATS_INTERVAL_S)

    async def _start(self) -> ChildProcess:
        return await ChildProcess.start("tap.admin", self._setup, _replies, [self._setup.listen_fd])
