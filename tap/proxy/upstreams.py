"""Which upstream gets a request: each in turn, or the one that its session hashes to; never one known to be down.

A session's upstream is found by rendezvous hashing: the highest of the hashes of session and upstream wins. When an
upstream goes, only its own sessions move, and they come back with it; every worker and every tap decides alike.
"""

import contextlib
from collections.abc import Sequence
from time import monotonic

import xxhash

from wire.connection import ServerConnection
from wire.pool import ConnectError, ConnectionPool
from wire.requesthead import RequestHead
from wire.url import Origin

MAX_IDLE_S = 3.0
"""Upstream connections idle for longer are not used again: servers close them (uvicorn after 5 s), and a request that
crosses that close on the wire would be lost."""
MAX_IDLE_CONNECTIONS = 1024
CONNECT_TIMEOUT_S = 5.0
DOWN_S = 1.0
"""For how long an upstream that could not be reached is passed over; doubled each time it still cannot."""
MAX_DOWN_S = 30.0
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id")
"""Where a client says which conversation a request belongs to; the first of them that is there counts."""


class Upstream:
    """One server that requests go to, with its connections."""

    __slots__ = ("_down_s", "base_path", "down_until_s", "name", "origin", "pool", "seed")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.name = str(origin)
        self.base_path = origin.base_path.encode()
        self.seed = xxhash.xxh3_64_intdigest(self.name.encode())
        self.pool = ConnectionPool(
            origin, max_idle=MAX_IDLE_CONNECTIONS, max_idle_s=MAX_IDLE_S, connect_timeout_s=CONNECT_TIMEOUT_S
        )
        self.down_until_s = 0.0
        self._down_s = DOWN_S

    async def reach(self) -> ServerConnection:
        """A connection, kept or new. Raises ConnectError, and lets others have its requests for a while."""
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
        if self.down_until_s <= now:  # of many that fail at once, one is news
            self.down_until_s = now + self._down_s
            self._down_s = min(2 * self._down_s, MAX_DOWN_S)


class Upstreams:
    """All upstreams of one worker; requests are given out among them."""

    def __init__(self, origins: Sequence[Origin], *, by_session: bool = False, first: int = 0) -> None:
        """``first``: whose turn is first, so that several workers do not all begin with the same."""
        self._by_session = by_session
        self._turn = first - 1
        self._all: list[Upstream] = []
        self.reload(origins)

    @property
    def names(self) -> list[str]:
        """Their origins."""
        return [upstream.name for upstream in self._all]

    def reload(self, origins: Sequence[Origin]) -> None:
        """Use these from now on; those that stay keep their connections, those that go finish what they have."""
        known = {upstream.origin: upstream for upstream in self._all}
        self._all = [known.pop(origin) if origin in known else Upstream(origin) for origin in origins]
        for removed in known.values():
            removed.pool.retire()

    def pick(self, head: RequestHead) -> Upstream:
        """Who gets this request."""
        if len(self._all) == 1:
            return self._all[0]
        self._turn += 1
        return self._in_order(head)[0]

    async def connect(self, head: RequestHead, picked: Upstream) -> tuple[Upstream, ServerConnection]:
        """A connection to the picked upstream, or to the next that has one. Raises ConnectError if none has.

        This is no retrying: not a byte of the request is sent before one of them has accepted.
        """
        others = [upstream for upstream in self._in_order(head) if upstream is not picked]
        *firsts, last = [picked, *others]
        for upstream in firsts:
            with contextlib.suppress(ConnectError):
                return upstream, await upstream.reach()
        return last, await last.reach()

    def close(self) -> None:
        """Drop every connection, busy ones too."""
        for upstream in self._all:
            upstream.pool.close()

    def _in_order(self, head: RequestHead) -> list[Upstream]:
        """Whom to try, one after another: those thought to be up first."""
        session = session_of(head) if self._by_session else None
        if session is None:
            at = self._turn % len(self._all)
            ranked = self._all[at:] + self._all[:at]
        else:
            ranked = by_rendezvous(self._all, session)
        now = monotonic()
        return sorted(ranked, key=lambda upstream: upstream.down_until_s > now)


def session_of(head: RequestHead) -> bytes | None:
    """The session that the client names in a header; null: none."""
    for name in SESSION_HEADERS:
        values = head.values(name)
        if values and values[0]:
            return values[0]
    return None


def by_rendezvous(upstreams: Sequence[Upstream], session: bytes) -> list[Upstream]:
    """The upstreams in the order in which this session prefers them."""
    return sorted(upstreams, key=lambda one: xxhash.xxh3_64_intdigest(session, one.seed), reverse=True)
