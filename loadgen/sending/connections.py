"""The sender's connections: opened ahead of need, each request on one of them as soon as there is one."""

import asyncio
from collections import deque

from loadgen.sending.requestrun import RequestRun
from wire.connection import ServerConnection
from wire.pool import ConnectError, ConnectionPool

SPARE = 4
"""So many idle connections are kept open beyond those in use, so that a request more finds one."""


class Connections:
    """Gives requests connections; those that find none wait in order for whichever is free or open first."""

    def __init__(self, pool: ConnectionPool, limit: int | None) -> None:
        """``limit``: most connections, equal to the limit of requests in flight; null: no limit."""
        self._pool = pool
        self._limit = limit
        self._waiting: deque[RequestRun] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    def start(self, request: RequestRun) -> None:
        connection = self._pool.take_idle()
        if connection is None:
            self._waiting.append(request)
            self._open()
            return
        request.begin(connection)
        if self._pool.num_idle < SPARE and len(self._opening) < SPARE and self._may_open():
            self._open()

    def start_anew(self, request: RequestRun) -> None:
        """Begin a request on a new connection."""
        self._open(request)

    def serve(self) -> None:
        """Give idle connections to waiting requests."""
        while self._waiting:
            if self._waiting[0].end_ns:
                self._waiting.popleft()
                continue
            connection = self._pool.take_idle()
            if connection is None:
                return
            self._waiting.popleft().begin(connection)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        self._pool.close()

    def _may_open(self) -> bool:
        return self._limit is None or self._pool.num_open + len(self._opening) < self._limit

    def _open(self, request: RequestRun | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(request))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, request: RequestRun | None) -> None:
        """Open a connection for a request, or for the first waiting request."""
        try:
            connection = await self._pool.connect()
        except ConnectError as error:
            self._fail(request, error)
            return
        if request is None:
            self._give(connection)
        elif request.end_ns:
            self._pool.keep(connection)
        else:
            request.begin(connection)

    def _give(self, connection: ServerConnection) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            if not request.end_ns:
                request.begin(connection)
                return
        self._pool.keep(connection)

    def _fail(self, request: RequestRun | None, error: ConnectError) -> None:
        """End a request with the error: the request of this connection, or the first that waits."""
        while request is None or request.end_ns:
            if not self._waiting:
                return
            request = self._waiting.popleft()
        request.give_up("timeout" if error.kind == "connect_timeout" else "error", error.kind)
