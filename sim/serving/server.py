"""Listens, and knows its connections, so that they can be drained."""

import asyncio
import contextlib
import socket
from time import perf_counter_ns

from sim.serving.connection import Connection, Handler

BACKLOG = 4096
KEEP_ALIVE_S = 75.0
"""How long a connection may wait for a request, or for the rest of one."""
SWEEP_S = 5.0


class Server:
    """Connections of one listening socket; each complete request goes to ``handle``."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._none_open = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def listen_on(self, sock: socket.socket) -> None:
        """Accept connections from a bound socket."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, sock=sock, backlog=BACKLOG)
        self._sweep()

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, let responses in progress end for so long, and cut the rest. Can be cancelled to cut."""
        assert self._listener is not None
        assert self._sweeper is not None
        self._listener.close()
        self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close_when_idle()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._none_open.wait()

    async def cut(self) -> None:
        """Close every connection, whatever is going on."""
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    def _accept(self) -> Connection:
        connection = Connection(self._handle, self._closed)
        self._connections.add(connection)
        self._none_open.clear()
        return connection

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._none_open.set()

    def _sweep(self) -> None:
        """Close connections that have been silent for too long."""
        oldest_ns = perf_counter_ns() - round(KEEP_ALIVE_S * 1e9)
        for connection in list(self._connections):
            if not connection.busy and connection.last_ns < oldest_ns:
                connection.abort()
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
