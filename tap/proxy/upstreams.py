"""Upstreams of a worker: a policy of ``engines.routing`` chooses among those that are healthy and not ejected."""

import errno
from collections.abc import Callable, Sequence
from time import monotonic

import xxhash

from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens
from engines.routing.rendezvous import engine_seed
from tap.ipc.messages import UpstreamEntry, UpstreamStats, say
from tap.ipc.sharedmemory import HELD_TOKENS, LOAD_CELLS, PREFILL_TOKENS, REQUESTS, UpstreamBoard
from tap.proxy.ejection import Ejection
from tap.proxy.routing import (
    PIECE_BYTES,
    PIECE_TOKENS,
    LivePolicy,
    live_policy,
    prompt_start,
    prompt_tokens,
    session_of,
)
from tracefile.hashing.hashkey import HashKey, keyed_id
from wire.client.connection import ServerConnection
from wire.client.pool import ConnectError, ConnectionPool
from wire.client.proxies import forwarding
from wire.requesthead import RequestHead
from wire.tls import SYSTEM_TLS, Tls
from wire.url import Origin, parse_url

MAX_IDLE_S = 3.0
"""Upstream connections idle for longer are not used again: servers close them (uvicorn after 5 s), and a request that
crosses that close on the wire would be lost."""
MAX_IDLE_CONNECTIONS = 1024
CONNECT_TIMEOUT_S = 5.0
SESSION_SEED = 0x5E5510
SERVER_ERROR = 500
SICK = frozenset({500, 502, 503, 504})
"""Statuses of an upstream that fails; others from 500 on are about the request."""
OWN_LACK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection for want of this worker's own files, memory or ports: they tell nothing of the upstream."""


class Upstream:
    """An upstream server, its connections, its state and its counts."""

    __slots__ = (
        "base_path",
        "counts",
        "dialect",
        "ejection",
        "engine",
        "healthy",
        "hit_keys",
        "name",
        "on_ejection",
        "origin",
        "pool",
        "proxy_headers",
        "requests",
        "sessions",
        "slot",
        "table",
        "target_start",
        "told_keys",
        "watched",
    )

    def __init__(
        self,
        entry: UpstreamEntry,
        board: UpstreamBoard | None = None,
        *,
        worker: int = 0,
        tls: Tls = SYSTEM_TLS,
    ) -> None:
        self.origin = origin = parse_url(entry.url)
        self.name = str(origin)
        self.base_path = origin.base_path.encode()
        start, self.proxy_headers = forwarding(origin)
        self.target_start = start + self.base_path
        self.pool = ConnectionPool(
            origin,
            tls=tls,
            max_idle=MAX_IDLE_CONNECTIONS,
            max_idle_s=MAX_IDLE_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        board = board or UpstreamBoard()
        self.slot, self.dialect, self.healthy = entry.slot, entry.dialect, entry.healthy
        self.counts = board.row(worker)[entry.slot * LOAD_CELLS : (entry.slot + 1) * LOAD_CELLS]
        """This worker's part of the counts."""
        self.table, self.sessions = board.table(entry.slot), board.sessions(entry.slot)
        self.engine = RoutedEngine(place=entry.slot, name=self.name, seed=engine_seed(self.name))
        self.ejection = Ejection()
        self.watched = False
        """There are others that could take its requests."""
        self.on_ejection: Callable[[], None] = _ignore
        """Called when it is ejected, and when that ends."""
        self.requests = 0
        """Requests sent by this worker."""
        self.told_keys = self.hit_keys = 0
        """Keys of prompts sent here, and the leading ones among them that the table had."""

    @property
    def in_flight(self) -> int:
        """Requests of this worker that have not ended."""
        return int(self.counts[REQUESTS])

    @property
    def steady(self) -> bool:
        """True until something changes: new sessions may come here."""
        return self.healthy and self.ejection.until_s == 0.0

    def serves(self, now_s: float) -> bool:
        """Return True if new sessions may come here."""
        return self.healthy and self.ejection.admits(now_s)

    def has_session(self, key: int) -> bool:
        """Return True if the session's latest request went here."""
        return self.sessions.overlap((key,)) == 1

    def take(self, entry: UpstreamEntry) -> None:
        """Take its state from the supervisor; one that was out and is back has an empty cache."""
        if entry.healthy and not self.healthy:
            self.lose_cache()
        self.dialect, self.healthy = entry.dialect, entry.healthy

    def lose_cache(self) -> None:
        """Forget what was sent to it."""
        self.table.clear()
        self.sessions.clear()

    async def reach(self) -> ServerConnection:
        """Return a kept or a new connection. Raises ConnectError, and ejects the upstream for a while."""
        connection = self.pool.take_idle()
        if connection is not None:
            return connection
        try:
            connection = await self.pool.connect()
            if not connection.usable:  # closed again before anything could be sent
                raise ConnectError(self.origin, "connect_failed")
        except ConnectError as error:
            if error.kind == "connect_refused":  # its process is gone, and its cache
                self.lose_cache()
            if getattr(error.__context__, "errno", None) not in OWN_LACK:
                self._failed(error.reason, unreached=True)
            raise
        if self.ejection.unreached:
            self._succeeded()
        return connection

    def responded(self, status: int) -> None:
        """Take a response's status; called for errors, and for all while there is trouble."""
        if status in SICK:
            self._failed(f"HTTP {status}")
        else:
            self._succeeded()

    def lost(self) -> None:
        """Note a connection that ended before its response began."""
        self._failed("no response")

    def _succeeded(self) -> None:
        if self.ejection.succeed(monotonic()):
            self.on_ejection()
            say(f"upstream {self.name} is back")

    def _failed(self, reason: str, *, unreached: bool = False) -> None:
        now_s = monotonic()
        if not self.watched:
            if unreached and self.ejection.miss(now_s):
                say(f"upstream {self.name} takes no connection ({reason}); CLIENTS GET 502 until it does")
        elif self.ejection.fail(now_s, unreached=unreached):
            self.on_ejection()
            say(f"upstream {self.name} gets no requests for {self.ejection.wait_s(now_s):.0f} s ({reason})")


class Assignment:
    """A request's upstream, without a choice: its part in the upstream's counts from ``begin`` to ``end``."""

    __slots__ = ("_begun", "upstream")

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._begun = False

    def begin(self) -> None:
        upstream = self.upstream
        self._begun = True
        upstream.requests += 1
        upstream.counts[REQUESTS] += 1

    def first_token(self) -> None:
        """Take the prefill as done."""

    def end(self) -> None:
        """Close its part of the counts; a second call does nothing."""
        if self._begun:
            self._begun = False
            self.upstream.counts[REQUESTS] -= 1


class Choice(Assignment):
    """A request's upstream, chosen by a policy that learns of the request's course."""

    __slots__ = ("_everyone", "_policy", "_prefill_tokens", "_session_key", "request")

    def __init__(
        self,
        upstream: Upstream,
        request: RoutedRequest,
        policy: LivePolicy,
        session_key: int | None,
        everyone: Sequence[Upstream],
    ) -> None:
        super().__init__(upstream)
        self.request, self._policy = request, policy
        self._session_key, self._everyone = session_key, everyone
        self._prefill_tokens = 0

    def begin(self) -> None:
        super().begin()
        request, upstream = self.request, self.upstream
        if upstream.ejection.until_s:
            upstream.ejection.begin(monotonic())
        if request.blocks:
            upstream.told_keys += len(request.blocks)
            upstream.hit_keys += upstream.table.overlap(request.blocks)
            upstream.table.add(request.blocks)
        if request.prompt_tokens:
            self._prefill_tokens = int(uncached_tokens(request, upstream.engine))
            upstream.counts[PREFILL_TOKENS] += self._prefill_tokens
            upstream.counts[HELD_TOKENS] += request.prompt_tokens
        if self._session_key is not None and not upstream.has_session(self._session_key):
            for one in self._everyone:
                one.sessions.remove(self._session_key)
            upstream.sessions.add((self._session_key,))
        if self._policy.learner is not None:
            self._policy.learner.sent(request, upstream.engine)

    def first_token(self) -> None:
        if self._prefill_tokens:
            self.upstream.counts[PREFILL_TOKENS] -= self._prefill_tokens
            self._prefill_tokens = 0

    def end(self) -> None:
        if self._begun:
            super().end()
            if self.request.prompt_tokens:
                self.first_token()
                self.upstream.counts[HELD_TOKENS] -= self.request.prompt_tokens
            if self._policy.learner is not None:
                self._policy.learner.ended(self.request, self.upstream.engine, monotonic())


class Upstreams:
    """All upstreams of a worker, and the choice among them."""

    def __init__(
        self,
        entries: Sequence[UpstreamEntry],
        policy: LivePolicy | None = None,
        *,
        board: UpstreamBoard | None = None,
        worker: int = 0,
        capacity_blocks: int = 0,
        tls: Tls = SYSTEM_TLS,
        key: HashKey | None = None,
    ) -> None:
        """``policy``: round-robin if none is given. ``worker``: its number, for another first turn than others'.

        ``key``: of records' session ids, which sessions are then routed by, so that a simulation routes them alike.
        """
        self._key = key
        self.policy = policy or live_policy("round-robin")
        self.board = board or UpstreamBoard()
        self._worker, self._tls = worker, tls
        self._capacity_blocks = capacity_blocks
        self._number = worker - 1
        self.all: list[Upstream] = []
        self._steady: list[Upstream] | None = None
        """All upstreams while each takes new sessions. Null: who serves is to be looked at."""
        self.reload(entries)

    @property
    def reads_prompt(self) -> bool:
        """True if the choice waits for the start of the prompt."""
        return self.policy.reads_prompt and len(self.all) > 1

    def reload(self, entries: Sequence[UpstreamEntry]) -> None:
        """Use these upstreams from now on; kept ones keep their connections, removed ones finish theirs."""
        known = {(upstream.origin, upstream.slot): upstream for upstream in self.all}
        self.all = [self._taken(entry, known) for entry in entries]
        for removed in known.values():
            removed.pool.retire()
            removed.lose_cache()  # its slot may be another's next
        for upstream in self.all:
            upstream.watched, upstream.on_ejection = len(self.all) > 1, self._look
        self._look()

    def _look(self) -> None:
        """Keep the list to choose from while nothing changes, so that no request makes it."""
        self._steady = self.all if all(upstream.steady for upstream in self.all) else None

    def _taken(self, entry: UpstreamEntry, known: dict[tuple[Origin, int], Upstream]) -> Upstream:
        upstream = known.pop((parse_url(entry.url), entry.slot), None)
        if upstream is None:
            upstream = Upstream(entry, self.board, worker=self._worker, tls=self._tls)
            upstream.engine.capacity_blocks = self._capacity_blocks
            upstream.engine.costs = self.policy.costs
            return upstream
        upstream.take(entry)
        return upstream

    def provisional(self) -> Assignment:
        """Return an assignment for the time before the choice."""
        return Assignment(self.all[0])

    def pick_by_prompt(self, head: RequestHead, reads: Sequence[bytes]) -> Assignment:
        """Choose an upstream by the start of a body."""
        return self.pick(head, prompt_start(reads) if reads else ())

    def pick(self, head: RequestHead, keys: Sequence[int] = (), passed: Sequence[Upstream] = ()) -> Assignment:
        """Choose an upstream. ``keys``: of the prompt's start; ``passed``: upstreams that could not be reached."""
        if len(self.all) == 1:
            return Assignment(self.all[0])
        now_s, policy = monotonic(), self.policy
        self._number += 1
        session = self._session(head) if policy.keeps_sessions else None
        session_key = None if session is None else xxhash.xxh3_64_intdigest(session, SESSION_SEED)
        candidates = (None if passed else self._steady) or self._candidates(now_s, passed)
        tokens = prompt_tokens(head) if policy.sees_load else 0
        request = RoutedRequest(self._number, now_s, session, keys, PIECE_TOKENS, tokens)
        if policy.sees_load:
            engines = [self._seen(upstream, keys, session_key, tokens) for upstream in candidates]
        else:
            engines = [upstream.engine for upstream in candidates]
        return Choice(candidates[policy.choose(request, engines)], request, self.policy, session_key, self.all)

    def _session(self, head: RequestHead) -> bytes | None:
        told = session_of(head)
        if told is None or self._key is None:
            return told
        return keyed_id(self._key, "session", told.decode("latin-1")).encode()

    def pick_next(self, head: RequestHead, before: Assignment, passed: Sequence[Upstream]) -> Assignment | None:
        """Choose another upstream than those that could not be reached; null: none is left.

        This is no retry: no byte of the request is sent before a server has accepted the connection.
        """
        if all(upstream in passed for upstream in self.all):
            return None
        return self.pick(head, before.request.blocks if isinstance(before, Choice) else (), passed)

    def stats(self) -> list[UpstreamStats]:
        now_s = monotonic()
        return [
            UpstreamStats(
                upstream=one.name,
                requests=one.requests,
                in_flight=one.in_flight,
                ejected=not one.ejection.admits(now_s),
                ejections=one.ejection.count,
                prompt_bytes=one.told_keys * PIECE_BYTES,
                known_bytes=one.hit_keys * PIECE_BYTES,
            )
            for one in self.all
        ]

    def close(self) -> None:
        for upstream in self.all:
            upstream.pool.close()

    def _candidates(self, now_s: float, passed: Sequence[Upstream]) -> list[Upstream]:
        """Return the upstreams to choose from: those that serve, or else all that are left."""
        left = [upstream for upstream in self.all if upstream not in passed]
        return [upstream for upstream in left if upstream.serves(now_s)] or left

    def _seen(
        self, upstream: Upstream, keys: Sequence[int], session_key: int | None, prompt_tokens: int
    ) -> RoutedEngine:
        """Bring an upstream's counts up to date.

        Keys end with the bytes that were read. Where seven of eight are known and the session's latest turn ran, the
        rest of the prompt is taken as known, too: sessions on one long prefix differ behind these bytes alone.
        """
        engine = upstream.engine
        engine.requests, engine.prefill_tokens, engine.held_tokens = self.board.totals(upstream.slot)
        engine.overlap = overlap = upstream.table.overlap(keys) if keys else 0
        pieces = int(prompt_tokens / PIECE_TOKENS)
        if (
            session_key is not None
            and overlap * 8 >= len(keys) * 7
            and len(keys) < pieces
            and upstream.has_session(session_key)
        ):
            engine.overlap = pieces
        return engine


def _ignore() -> None:
    """Drop a change that no caller waits for."""
