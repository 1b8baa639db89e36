"""Upstreams of a worker: requests routed in turn or by session (``engines.routing``), past upstreams that are down."""

import contextlib
from collections.abc import Sequence
from time import monotonic

from engines.routing import by_rendezvous, engine_seed, in_turn
from wire.connection import ServerConnection
from wire.dialing import SYSTEM_TLS, Tls, forwarding
from wire.pool import ConnectError, ConnectionPool
from wire.requesthead import RequestHead
from wire.url import Origin

MAX_IDLE_S = 3.0
"""Upstream connections idle for longer are not used again: servers close them (uvicorn after 5 s), and a request that
crosses that close on the wire would be lost."""
MAX_IDLE_CONNECTIONS = 1024
CONNECT_TIMEOUT_S = 5.0
DOWN_S = 1.0
"""Time for which an unreachable upstream is skipped; doubled at each further failure."""
MAX_DOWN_S = 30.0
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id")
"""Headers with the client's conversation id; the first one present counts."""


class Upstream:
    """An upstream server and its connections."""

    __slots__ = (
        "_down_s",
        "base_path",
        "down_until_s",
        "name",
        "origin",
        "pool",
        "proxy_headers",
        "seed",
        "target_start",
    )

    def __init__(self, origin: Origin, tls: Tls = SYSTEM_TLS) -> None:
        self.origin = origin
        self.name = str(origin)
        self.base_path = origin.base_path.encode()
        start, self.proxy_headers = forwarding(origin)
        self.target_start = start + self.base_path
        self.seed = engine_seed(self.name)
        self.pool = ConnectionPool(
            origin,
            tls=tls,
            max_idle=MAX_IDLE_CONNECTIONS,
            max_idle_s=MAX_IDLE_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        self.down_until_s = 0.0
        self._down_s = DOWN_S

    async def reach(self) -> ServerConnection:
        """Return a kept or a new connection. Raises ConnectError, and marks the upstream as down for a while."""
        connection = self.pool.take_idle()
        if connection is not None:
            return connection
        try:
            connection = await self.pool.connect()
            if not connection.usable:  # closed again before anything could be sent
                raise ConnectError(self.origin, "connect_failed")
        except ConnectError:
            self._mark_down()
            raise
        self.down_until_s, self._down_s = 0.0, DOWN_S
        return connection

    def _mark_down(self) -> None:
        now = monotonic()
        if self.down_until_s <= now:  # of many failures at once, the first counts
            self.down_until_s = now + self._down_s
            self._down_s = min(2 * self._down_s, MAX_DOWN_S)


class Upstreams:
    """All upstreams of a worker, and the choice among them."""

    def __init__(
        self, origins: Sequence[Origin], *, by_session: bool = False, first: int = 0, tls: Tls = SYSTEM_TLS
    ) -> None:
        """``first``: place of the first turn, so that several workers do not all begin with one upstream."""
        self._by_session, self._tls = by_session, tls
        self._turn = first - 1
        self._all: list[Upstream] = []
        self.reload(origins)

    @property
    def names(self) -> list[str]:
        return [upstream.name for upstream in self._all]

    def reload(self, origins: Sequence[Origin]) -> None:
        """Use these upstreams from now on; kept ones keep their connections, removed ones finish theirs."""
        known = {upstream.origin: upstream for upstream in self._all}
        self._all = [known.pop(origin) if origin in known else Upstream(origin, self._tls) for origin in origins]
        for removed in known.values():
            removed.pool.retire()

    def pick(self, head: RequestHead) -> Upstream:
        if len(self._all) == 1:
            return self._all[0]
        self._turn += 1
        return self._in_order(head)[0]

    async def connect(self, head: RequestHead, picked: Upstream) -> tuple[Upstream, ServerConnection]:
        """Return a connection to the picked upstream, or to the next one reached. Raises ConnectError if there is none.

        This is no retry: no byte of the request is sent before a server has accepted the connection.
        """
        others = [upstream for upstream in self._in_order(head) if upstream is not picked]
        *firsts, last = [picked, *others]
        for upstream in firsts:
            with contextlib.suppress(ConnectError):
                return upstream, await upstream.reach()
        return last, await last.reach()

    def close(self) -> None:
        for upstream in self._all:
            upstream.pool.close()

    def _in_order(self, head: RequestHead) -> list[Upstream]:
        session = session_of(head) if self._by_session else None
        if session is None:
            places = in_turn(self._turn, len(self._all))
        else:
            places = by_rendezvous([upstream.seed for upstream in self._all], session)
        now = monotonic()
        return sorted((self._all[place] for place in places), key=lambda upstream: upstream.down_until_s > now)


def session_of(head: RequestHead) -> bytes | None:
    for name in SESSION_HEADERS:
        values = head.values(name)
        if values and values[0]:
            return values[0]
    return None
