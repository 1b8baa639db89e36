"""Pool of keep-alive connections to one server."""

import asyncio
import math
import time

from wire.client.connection import ServerConnection
from wire.client.dialing import failure
from wire.errors import LossKind, WireError
from wire.loop import Turns
from wire.tls import SYSTEM_TLS, Tls, client_context
from wire.url import Origin


class ConnectError(WireError):
    """Failed connection: ``kind`` of failure, and ``reason`` with the expectation."""

    def __init__(self, origin: Origin, kind: LossKind, reason: str = "") -> None:
        self.reason = reason or kind.replace("_", " ")
        super().__init__(f"cannot connect to {origin}: {self.reason}")
        self.kind: LossKind = kind


class ConnectionPool:
    """Keep-alive connections to ``origin``, last used first; the server may have closed a ``stale`` connection."""

    def __init__(
        self,
        origin: Origin,
        *,
        tls: Tls = SYSTEM_TLS,
        connect_timeout_s: float = 10.0,
        max_idle: int = 1024,
        max_idle_s: float = math.inf,
    ) -> None:
        """``max_idle_s``: limit for reuse, for callers that cannot retry a request lost to a close."""
        self.origin = origin
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._retries = math.isinf(max_idle_s)
        self._idle: dict[ServerConnection, float] = {}  # idle since, in order
        self._open: set[ServerConnection] = set()
        self._turns = Turns()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def pop_idle(self) -> ServerConnection | None:
        """Return an idle connection within ``max_idle_s``; None: no such connection."""
        while self._idle:
            connection, since_s = self._idle.popitem()
            in_time = time.monotonic() - since_s <= self._max_idle_s
            # The loop may not have processed a close yet. Callers that retry skip the system call of the check.
            if in_time and connection.usable and (self._retries or not connection.peer_closed):
                return connection
            connection.abort()
        return None

    async def connect(self) -> ServerConnection:
        origin, loop = self.origin, asyncio.get_running_loop()
        try:
            tls = client_context(self._tls) if origin.scheme == "https" else None
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(self._new_connection, origin.host, origin.port, ssl=tls)
        except WireError as error:  # a TLS file
            raise ConnectError(origin, "tls_failed", str(error)) from None
        except OSError as error:
            raise ConnectError(origin, *failure(error, origin, self._connect_timeout_s)) from None
        self._open.add(connection)
        return connection

    def _new_connection(self) -> ServerConnection:
        return ServerConnection(self.keep, self._remove, self._turns)

    async def warm(self, count: int) -> None:
        """Open connections until ``count`` are idle; raises ConnectError."""
        missing = max(0, count - self.num_idle)
        for connection in await asyncio.gather(*(self.connect() for _ in range(missing))):
            self.keep(connection)

    def retire(self) -> None:
        """Close idle connections now, and busy connections at the end of their exchange."""
        self._max_idle = 0
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def keep(self, connection: ServerConnection) -> None:
        if len(self._idle) < self._max_idle:
            connection.waited = True
            self._idle[connection] = time.monotonic()
        else:
            connection.abort()

    def _remove(self, connection: ServerConnection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)
