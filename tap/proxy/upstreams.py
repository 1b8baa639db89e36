"""Upstreams of a worker: a policy of ``engines.routing`` chooses among those that are not ejected."""

import errno
from collections.abc import Sequence
from time import monotonic

import xxhash

from engines.routing.load import engine_seed
from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens
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
from wire.head import RequestHead
from wire.tls import SYSTEM_TLS, Tls
from wire.url import parse_url

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
        self.pool = ConnectionPool(
            origin,
            tls=tls,
            max_idle=MAX_IDLE_CONNECTIONS,
            max_idle_s=MAX_IDLE_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        board = board or UpstreamBoard()
        self.slot, self.dialect = entry.slot, entry.dialect
        self.counts = board.row(worker)[entry.slot * LOAD_CELLS : (entry.slot + 1) * LOAD_CELLS]
        """This worker's part of the counts."""
        self.table, self.sessions = board.table(entry.slot), board.sessions(entry.slot)
        self.engine = RoutedEngine(place=entry.slot, name=self.name, seed=engine_seed(self.name))
        self.ejection = Ejection()
        self.watched = False
        """There are others that could take its requests."""
        self.requests = 0
        """Requests sent by this worker."""
        self.told_keys = self.hit_keys = 0
        """Keys of prompts sent here, and the leading ones among them that the table had."""

    def has_session(self, key: int) -> bool:
        """Return True if the session's latest request went here."""
        return self.sessions.overlap((key,)) == 1

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
                self.failed(error.reason, unreached=True)
            raise
        if self.ejection.unreached:
            self._succeeded()
        return connection

    def responded(self, status: int) -> None:
        """Take a response's status; called for errors, and for all while there is trouble."""
        if status in SICK:
            self.failed(f"HTTP {status}")
        else:
            self._succeeded()

    def failed(self, reason: str, *, unreached: bool = False) -> None:
        """Note a failure, such as a connection that ended before its response began."""
        now_s = monotonic()
        if not self.watched:
            if unreached and self.ejection.miss():
                say(f"upstream {self.name} takes no connection ({reason}); CLIENTS GET 502 until it does")
        elif self.ejection.fail(now_s, unreached=unreached):
            say(f"upstream {self.name} gets no requests for {self.ejection.wait_s(now_s):.0f} s ({reason})")

    def _succeeded(self) -> None:
        if self.ejection.succeed():
            say(f"upstream {self.name} is back")


class Assignment:
    """A request's upstream: its part in the upstream's counts from ``begin`` to ``end``."""

    __slots__ = ("_begun", "_prefill_tokens", "_session_key", "_upstreams", "request", "upstream")

    def __init__(
        self,
        upstreams: "Upstreams",
        upstream: Upstream,
        request: RoutedRequest | None = None,
        session_key: int | None = None,
    ) -> None:
        """``request``: as the policy saw it; null: there was no choice."""
        self._upstreams, self.upstream, self.request, self._session_key = upstreams, upstream, request, session_key
        self._begun = False
        self._prefill_tokens = 0

    def begin(self) -> None:
        self._begun = True
        self.upstream.requests += 1
        self.upstream.counts[REQUESTS] += 1
        if self.request is not None:
            self._count(self.request, self.upstream)

    def first_token(self) -> None:
        """Take the prefill as done."""
        if self._prefill_tokens:
            self.upstream.counts[PREFILL_TOKENS] -= self._prefill_tokens
            self._prefill_tokens = 0

    def end(self) -> None:
        """Close its part of the counts; a second call does nothing."""
        if not self._begun:
            return
        self._begun = False
        self.upstream.counts[REQUESTS] -= 1
        if self.request is None:
            return
        self.first_token()
        self.upstream.counts[HELD_TOKENS] -= self.request.prompt_tokens
        if self._upstreams.policy.learner is not None:
            self._upstreams.policy.learner.ended(self.request, self.upstream.engine, monotonic())

    def _count(self, request: RoutedRequest, upstream: Upstream) -> None:
        if upstream.ejection.until_s:
            upstream.ejection.begin(monotonic())
        if request.blocks:
            upstream.told_keys += len(request.blocks)
            upstream.hit_keys += upstream.table.overlap(request.blocks)
            upstream.table.add(request.blocks)
        self._prefill_tokens = int(uncached_tokens(request, upstream.engine))
        upstream.counts[PREFILL_TOKENS] += self._prefill_tokens
        upstream.counts[HELD_TOKENS] += request.prompt_tokens
        if self._session_key is not None and not upstream.has_session(self._session_key):
            for other in self._upstreams.all:
                other.sessions.remove(self._session_key)
            upstream.sessions.add((self._session_key,))
        if self._upstreams.policy.learner is not None:
            self._upstreams.policy.learner.sent(request, upstream.engine)


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
        self._worker, self._tls, self._capacity_blocks = worker, tls, capacity_blocks
        self._number = worker - 1
        self.all: list[Upstream] = []
        self.reload(entries)

    @property
    def reads_prompt(self) -> bool:
        """True if the choice waits for the start of the prompt."""
        return self.policy.reads_prompt and len(self.all) > 1

    def reload(self, entries: Sequence[UpstreamEntry]) -> None:
        """Use these upstreams from now on; kept ones keep their connections, removed ones finish theirs."""
        known = {(upstream.name, upstream.slot): upstream for upstream in self.all}
        keys = [(entry.url, entry.slot) for entry in entries]
        self.all = [
            known.pop(key) if key in known else self._new(entry) for key, entry in zip(keys, entries, strict=True)
        ]
        for removed in known.values():
            removed.pool.retire()
            removed.lose_cache()  # its slot may be another's next
        for upstream, entry in zip(self.all, entries, strict=True):
            upstream.watched, upstream.dialect = len(self.all) > 1, entry.dialect

    def _new(self, entry: UpstreamEntry) -> Upstream:
        upstream = Upstream(entry, self.board, worker=self._worker, tls=self._tls)
        upstream.engine.capacity_blocks, upstream.engine.costs = self._capacity_blocks, self.policy.costs
        return upstream

    def provisional(self) -> Assignment:
        """Return an assignment for the time before the choice."""
        return Assignment(self, self.all[0])

    def pick_by_prompt(self, head: RequestHead, reads: Sequence[bytes]) -> Assignment:
        """Choose an upstream by the start of a body."""
        return self.pick(head, prompt_start(reads) if reads else ())

    def pick(self, head: RequestHead, keys: Sequence[int] = (), passed: Sequence[Upstream] = ()) -> Assignment:
        """Choose an upstream. ``keys``: of the prompt's start; ``passed``: upstreams that could not be reached."""
        if len(self.all) == 1:
            return Assignment(self, self.all[0])
        now_s, policy = monotonic(), self.policy
        self._number += 1
        session = self._session(head) if policy.keeps_sessions else None
        session_key = None if session is None else xxhash.xxh3_64_intdigest(session, SESSION_SEED)
        left = [upstream for upstream in self.all if upstream not in passed] if passed else self.all
        candidates = [upstream for upstream in left if upstream.ejection.admits(now_s)] or left
        tokens = prompt_tokens(head) if policy.sees_load else 0
        request = RoutedRequest(self._number, now_s, session, keys, PIECE_TOKENS, tokens)
        if policy.sees_load:
            engines = [self._seen(upstream, keys, session_key, tokens) for upstream in candidates]
        else:
            engines = [upstream.engine for upstream in candidates]
        return Assignment(self, candidates[policy.choose(request, engines)], request, session_key)

    def pick_next(self, head: RequestHead, before: Assignment, passed: Sequence[Upstream]) -> Assignment | None:
        """Choose another upstream than those that could not be reached; null: none is left.

        This is no retry: no byte of the request is sent before a server has accepted the connection.
        """
        if all(upstream in passed for upstream in self.all):
            return None
        return self.pick(head, () if before.request is None else before.request.blocks, passed)

    def stats(self) -> list[UpstreamStats]:
        now_s = monotonic()
        return [
            UpstreamStats(
                upstream=one.name,
                requests=one.requests,
                in_flight=int(one.counts[REQUESTS]),
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

    def _session(self, head: RequestHead) -> bytes | None:
        named = session_of(head)
        if named is None or self._key is None:
            return named
        return keyed_id(self._key, "session", named.decode("latin-1")).encode()

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
        mostly_known = overlap * 8 >= len(keys) * 7 and len(keys) < pieces
        if session_key is not None and mostly_known and upstream.has_session(session_key):
            engine.overlap = pieces
        return engine
