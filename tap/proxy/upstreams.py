"""Upstreams of a worker: load, prefix table, health and the choice by a policy of ``engines.routing``."""

import errno
from collections.abc import Sequence
from time import monotonic

import xxhash

from engines.routing.load import engine_seed
from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens
from tap.ipc.messages import UpstreamEntry, UpstreamStats, log_line
from tap.ipc.sharedmemory import IN_FLIGHT_TOKENS, LOAD_CELLS, PREFILL_TOKENS, REQUESTS, UpstreamBoard
from tap.proxy.ejection import Ejection
from tap.proxy.routing import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LivePolicy,
    live_policy,
    prefix_block_keys,
    prompt_tokens,
    session_id_of,
)
from tracefile.hashing.hashkey import HashKey, keyed_id
from wire.client.connection import ServerConnection
from wire.client.pool import ConnectError, ConnectionPool
from wire.head import RequestHead
from wire.tls import SYSTEM_TLS, Tls
from wire.url import parse_url

MAX_IDLE_S = 3.0
"""Longest idle time of a reused connection. Servers close idle connections (uvicorn after 5 s), and a request that
crosses the close on the wire would be lost."""
MAX_IDLE_CONNECTIONS = 1024
CONNECT_TIMEOUT_S = 5.0
SESSION_SEED = 0x5E5510
SERVER_ERROR = 500
FAILURE_STATUSES = frozenset({500, 502, 503, 504})
"""Statuses that count as upstream failures; other 5xx statuses concern the request."""
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Connection errors from exhausted files, memory or ports of this worker. They do not eject the upstream."""


class Upstream:
    """An upstream engine: connections, health, outstanding prefill tokens and its prefix table."""

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
        """Load cells of this worker: requests, prefill tokens, tokens in flight."""
        self.prefix_table, self.sessions = board.prefix_table(entry.slot), board.sessions(entry.slot)
        self.engine = RoutedEngine(index=entry.slot, name=self.name, seed=engine_seed(self.name))
        self.ejection = Ejection()
        self.has_peers = False
        """True: the upstream can be ejected, since other upstreams can serve its requests."""
        self.requests = 0
        """Requests that this worker sent."""
        self.prompt_blocks = self.hit_blocks = 0
        """Prefix blocks of the prompts sent here, and the prefix hits among them."""

    def has_session(self, key: int) -> bool:
        """Return True if the session's latest request went here."""
        return self.sessions.overlap((key,)) == 1

    def clear_prefix_table(self) -> None:
        """Empty the prefix table and the sessions: the engine's KV cache is lost."""
        self.prefix_table.clear()
        self.sessions.clear()

    async def connect(self) -> ServerConnection:
        """Return an idle or a new connection. Raises ConnectError and ejects the upstream for a while."""
        connection = self.pool.pop_idle()
        if connection is not None:
            return connection
        try:
            connection = await self.pool.connect()
            if not connection.usable:  # closed again before anything could be sent
                raise ConnectError(self.origin, "connect_failed")
        except ConnectError as error:
            if error.kind == "connect_refused":  # its process has ended: the KV cache is lost
                self.clear_prefix_table()
            if getattr(error.__context__, "errno", None) not in LOCAL_ERRORS:
                self.failed(error.reason, unreached=True)
            raise
        if self.ejection.unreached:
            self._succeeded()
        return connection

    def responded(self, status: int) -> None:
        """Record a response status: of every error, and of every response while failures are counted."""
        if status in FAILURE_STATUSES:
            self.failed(f"HTTP {status}")
        else:
            self._succeeded()

    def failed(self, reason: str, *, unreached: bool = False) -> None:
        """Record a failure, such as a connection that closed before the response."""
        now_s = monotonic()
        if not self.has_peers:
            if unreached and self.ejection.miss():
                log_line(f"upstream {self.name} accepts no connection ({reason}); CLIENTS GET 502 until it does")
        elif self.ejection.fail(now_s, unreached=unreached):
            log_line(f"upstream {self.name} gets no requests for {self.ejection.wait_s(now_s):.0f} s ({reason})")

    def _succeeded(self) -> None:
        if self.ejection.succeed():
            log_line(f"upstream {self.name} is back")


class Assignment:
    """A request on its upstream: counted in the upstream's load from ``begin`` to ``end``."""

    __slots__ = ("_counted", "_prefill_tokens", "_session_key", "_upstreams", "request", "upstream")

    def __init__(
        self,
        upstreams: "Upstreams",
        upstream: Upstream,
        request: RoutedRequest | None = None,
        session_key: int | None = None,
    ) -> None:
        """``request``: input of the routing policy. None: the tap has a single upstream."""
        self._upstreams, self.upstream, self.request, self._session_key = upstreams, upstream, request, session_key
        self._counted = False
        self._prefill_tokens = 0

    def begin(self) -> None:
        self._counted = True
        self.upstream.requests += 1
        self.upstream.counts[REQUESTS] += 1
        if self.request is not None:
            self._count(self.request, self.upstream)

    def first_token(self) -> None:
        """Subtract the request's prefill tokens from the upstream's load: the first token has arrived."""
        if self._prefill_tokens:
            self.upstream.counts[PREFILL_TOKENS] -= self._prefill_tokens
            self._prefill_tokens = 0

    def end(self) -> None:
        """Subtract the request from the upstream's load. Idempotent."""
        if not self._counted:
            return
        self._counted = False
        self.upstream.counts[REQUESTS] -= 1
        if self.request is None:
            return
        self.first_token()
        self.upstream.counts[IN_FLIGHT_TOKENS] -= self.request.prompt_tokens
        if self._upstreams.policy.learner is not None:
            self._upstreams.policy.learner.ended(self.request, self.upstream.engine, monotonic())

    def _count(self, request: RoutedRequest, upstream: Upstream) -> None:
        if upstream.ejection.until_s:
            upstream.ejection.begin(monotonic())
        if request.blocks:
            upstream.prompt_blocks += len(request.blocks)
            upstream.hit_blocks += upstream.prefix_table.overlap(request.blocks)
            upstream.prefix_table.add(request.blocks)
        self._prefill_tokens = int(uncached_tokens(request, upstream.engine))
        upstream.counts[PREFILL_TOKENS] += self._prefill_tokens
        upstream.counts[IN_FLIGHT_TOKENS] += request.prompt_tokens
        if self._session_key is not None and not upstream.has_session(self._session_key):
            for sibling in self._upstreams.all:
                sibling.sessions.remove(self._session_key)
            upstream.sessions.add((self._session_key,))
        if self._upstreams.policy.learner is not None:
            self._upstreams.policy.learner.sent(request, upstream.engine)


class Upstreams:
    """All upstreams of a worker, and the routing decision of each request."""

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
        """``policy``: default round-robin. ``worker``: its number; offsets the first turn of round-robin.

        ``key``: hash key of the records' session ids. Requests are routed by these ids, as in a simulation.
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
        """True if the routing decision needs the prompt prefix."""
        return self.policy.reads_prompt and len(self.all) > 1

    def reload(self, entries: Sequence[UpstreamEntry]) -> None:
        """Replace the upstreams. Remaining upstreams keep their connections; removed ones finish their requests."""
        current = {(upstream.name, upstream.slot): upstream for upstream in self.all}
        keys = [(entry.url, entry.slot) for entry in entries]
        self.all = [
            current.pop(key) if key in current else self._new(entry) for key, entry in zip(keys, entries, strict=True)
        ]
        for removed in current.values():
            removed.pool.retire()
            removed.clear_prefix_table()  # the slot may be assigned to another upstream
        for upstream, entry in zip(self.all, entries, strict=True):
            upstream.has_peers, upstream.dialect = len(self.all) > 1, entry.dialect

    def _new(self, entry: UpstreamEntry) -> Upstream:
        upstream = Upstream(entry, self.board, worker=self._worker, tls=self._tls)
        upstream.engine.capacity_blocks, upstream.engine.costs = self._capacity_blocks, self.policy.costs
        return upstream

    def provisional(self) -> Assignment:
        return Assignment(self, self.all[0])

    def pick_by_prompt(self, head: RequestHead, reads: Sequence[bytes]) -> Assignment:
        """Choose an upstream by the prompt prefix in the first bytes of a body."""
        return self.pick(head, prefix_block_keys(reads) if reads else ())

    def pick(self, head: RequestHead, keys: Sequence[int] = (), unreachable: Sequence[Upstream] = ()) -> Assignment:
        """Choose an upstream. ``keys``: prefix blocks of the prompt. ``unreachable``: upstreams to leave out."""
        if len(self.all) == 1:
            return Assignment(self, self.all[0])
        now_s, policy = monotonic(), self.policy
        self._number += 1
        session = self._session(head) if policy.keeps_sessions else None
        session_key = None if session is None else xxhash.xxh3_64_intdigest(session, SESSION_SEED)
        reachable = [upstream for upstream in self.all if upstream not in unreachable] if unreachable else self.all
        candidates = [upstream for upstream in reachable if upstream.ejection.admits(now_s)] or reachable
        tokens = prompt_tokens(head) if policy.sees_load else 0
        request = RoutedRequest(self._number, now_s, session, keys, BLOCK_TOKENS, tokens)
        if policy.sees_load:
            engines = [self._updated_engine(upstream, keys, session_key, tokens) for upstream in candidates]
        else:
            engines = [upstream.engine for upstream in candidates]
        return Assignment(self, candidates[policy.choose(request, engines)], request, session_key)

    def pick_next(self, head: RequestHead, before: Assignment, unreachable: Sequence[Upstream]) -> Assignment | None:
        """Choose among the remaining upstreams after a failed connection; None: none remains.

        This is not a retry: no byte of the request is sent before a server has accepted the connection.
        """
        if all(upstream in unreachable for upstream in self.all):
            return None
        return self.pick(head, () if before.request is None else before.request.blocks, unreachable)

    def stats(self) -> list[UpstreamStats]:
        now_s = monotonic()
        return [
            UpstreamStats(
                upstream=upstream.name,
                requests=upstream.requests,
                in_flight=int(upstream.counts[REQUESTS]),
                ejected=not upstream.ejection.admits(now_s),
                ejections=upstream.ejection.count,
                prompt_bytes=upstream.prompt_blocks * BLOCK_BYTES,
                hit_bytes=upstream.hit_blocks * BLOCK_BYTES,
            )
            for upstream in self.all
        ]

    def close(self) -> None:
        for upstream in self.all:
            upstream.pool.close()

    def _session(self, head: RequestHead) -> bytes | None:
        session_id = session_id_of(head)
        if session_id is None or self._key is None:
            return session_id
        return keyed_id(self._key, "session", session_id.decode("latin-1")).encode()

    def _updated_engine(
        self, upstream: Upstream, keys: Sequence[int], session_key: int | None, prompt_tokens: int
    ) -> RoutedEngine:
        """Update the engine's load and prefix overlap for a request.

        Keys cover the bytes that were read. If 7 of 8 keys hit on the upstream of the session's latest turn, the
        rest of the prompt counts as cached: sessions with a shared long prefix differ only behind these bytes.
        """
        engine = upstream.engine
        engine.requests, engine.prefill_tokens, engine.in_flight_tokens = self.board.totals(upstream.slot)
        engine.overlap = overlap = upstream.prefix_table.overlap(keys) if keys else 0
        prompt_blocks = int(prompt_tokens / BLOCK_TOKENS)
        mostly_cached = overlap * 8 >= len(keys) * 7 and len(keys) < prompt_blocks
        if session_key is not None and mostly_cached and upstream.has_session(session_key):
            engine.overlap = prompt_blocks
        return engine
