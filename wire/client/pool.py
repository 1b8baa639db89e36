"""Open connections to one server, kept for the next exchange."""

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
    """No connection: ``kind`` says how it failed, ``reason`` which step, and what was expected."""

    def __init__(self, origin: Origin, kind: LossKind, reason: str = "") -> None:
        self.reason = reason or kind.replace("_", " ")
        super().__init__(f"cannot connect to {origin}: {self.reason}")
        self.kind: LossKind = kind


class ConnectionPool:
    """Keep-alive connections to ``origin``, the latest used first; the server may have closed a ``stale`` one."""

    def __init__(
        self,
        origin: Origin,
        *,
        tls: Tls = SYSTEM_TLS,
        connect_timeout_s: float = 10.0,
        max_idle: int = 1024,
        max_idle_s: float = math.inf,
    ) -> None:
        """``max_idle_s``: connections that waited longer are dropped, for who cannot send again what a close loses."""
        self.origin = origin
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._sends_again = math.isinf(max_idle_s)
        self._idle: dict[ServerConnection, float] = {}  # since when, in the order in which they fell idle
        self._open: set[ServerConnection] = set()
        self._turns = Turns()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take_idle(self) -> ServerConnection | None:
        """An open connection that waits, and not for too long, if there is one."""
        while self._idle:
            connection, since_s = self._idle.popitem()
            in_time = time.monotonic() - since_s <= self._max_idle_s
            # A close may not have had its turn on the loop: who sends again saves the system call that asks.
            if in_time and connection.usable and (self._sends_again or not connection.left):
                return connection
            connection.abort()
        return None

    async def connect(self) -> ServerConnection:
        """A new connection. Raises ConnectError."""
        origin, loop = self.origin, asyncio.get_running_loop()
        try:
            tls = client_context(self._tls) if origin.scheme == "https" else None
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(self._made, origin.host, origin.port, ssl=tls)
        except WireError as error:  # a file of TLS
            raise ConnectError(origin, "tls_failed", str(error)) from None
        except OSError as error:
            raise ConnectError(origin, *failure(error, origin, self._connect_timeout_s)) from None
        self._open.add(connection)
        return connection

    def _made(self) -> ServerConnection:
        return ServerConnection(self.keep, self._forget, self._turns)

    async def warm(self, count: int) -> None:
        """Open connections until ``count`` wait. Raises ConnectError."""
        lacking = max(0, count - self.num_idle)
        for connection in await asyncio.gather(*(self.connect() for _ in range(lacking))):
            self.keep(connection)

    def retire(self) -> None:
        """Keep no connection any longer: idle ones go now, busy ones when their exchange has ended."""
        self._max_idle = 0
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        """Drop every connection, busy ones too."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def keep(self, connection: ServerConnection) -> None:
        """Take a connection back: its exchange has ended, or it was not needed after all."""
        if len(self._idle) < self._max_idle:
            connection.waited = True
            self._idle[connection] = time.monotonic()
        else:
            connection.abort()

    def _forget(self, connection: ServerConnection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)
