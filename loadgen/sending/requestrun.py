"""Run of one request: its connection's events, with the time of every read."""

import itertools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

from loadgen.sending.crossing import Ended, Order
from wire.client.connection import ResponseHead, ServerConnection
from wire.errors import LossKind, Outcome

READ_BYTES = 128
"""Memory of a read beside its bytes."""
BEGINNING_BYTES = 64 << 10
"""Bytes kept of a response that is given up for its length."""


class Owner(Protocol):
    """Receiver of a request's end."""

    def ended(self, request: "RequestRun") -> None:
        """The request has ended and its connection is free."""

    def stale(self, request: "RequestRun") -> None:
        """The server had closed the connection: send again on a new one."""


class RequestRun:
    """An order from its start to its end: the sink of its response."""

    __slots__ = (
        "_connection",
        "_owner",
        "_request",
        "_retried",
        "concurrency",
        "end_ns",
        "error_kind",
        "held",
        "kept_bytes",
        "most_bytes",
        "number",
        "outcome",
        "reads",
        "scheduled_ns",
        "sent_ns",
        "started_ns",
        "status",
        "told_reads",
        "whole",
    )

    def __init__(self, order: Order, owner: Owner, *, scheduled_ns: int, started_ns: int, concurrency: int, held: bool):
        self.number = order.number
        self.whole = order.whole
        self.scheduled_ns = scheduled_ns
        self.started_ns = started_ns
        self.concurrency = concurrency
        self.held = held
        self.sent_ns = 0
        self.end_ns = 0
        self.status: int | None = None
        self.outcome: Outcome = "ok"
        self.error_kind: LossKind | None = None
        self.reads: list[tuple[int, bytes]] = []
        self.kept_bytes = self.told_reads = 0
        self.most_bytes = order.most_bytes
        self._request = order.data
        self._owner = owner
        self._connection: ServerConnection | None = None
        self._retried = False

    def begin(self, connection: ServerConnection) -> None:
        """A second try keeps the first send time, because the server caused the delay."""
        self._connection = connection
        self.sent_ns = self.sent_ns or perf_counter_ns()
        connection.start(self._request, self)

    def give_up(self, outcome: Outcome, kind: LossKind | None) -> None:
        if self._connection is not None:
            self._connection.abort()
        self._end(outcome, kind)

    def give_up_overlong(self) -> None:
        """Keep the response's beginning alone: the shard would read millions of events."""
        sizes = itertools.accumulate(len(data) for _, data in self.reads)
        self.reads = [read for read, size in zip(self.reads, sizes, strict=True) if size <= BEGINNING_BYTES]
        self.give_up("error", "response_too_large")

    def summary(self) -> Ended:
        return Ended(
            self.number,
            self.scheduled_ns,
            self.sent_ns,
            self.end_ns,
            self.status,
            self.outcome,
            self.error_kind,
            self.concurrency,
            self.held,
            self.told_reads,
            self.reads,
        )

    # What the connection calls.

    def response_head(self, head: ResponseHead) -> None:
        if not head.informational:
            self.status = head.status
            self._request = b""  # it will not be sent again

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Keep a read, unless it held only framing."""
        del raw
        if data:
            self.kept_bytes += READ_BYTES + len(data)
            if self.kept_bytes > self.most_bytes:
                self.give_up_overlong()
            else:
                self.reads.append((at_ns, data))

    def response_end(self) -> None:
        self._end("ok", None)

    def response_lost(self, kind: LossKind) -> None:
        assert self._connection is not None
        if kind == "upstream_closed" and self._connection.stale and not self._retried:
            self._retried = True
            self._connection = None
            self._owner.stale(self)
        else:
            self._end("upstream_abort" if kind == "upstream_closed" else "error", kind)

    def pause_request(self) -> None:
        """The whole request is in the transport's buffer already."""

    def resume_request(self) -> None:
        """See ``pause_request``."""

    def _end(self, outcome: Outcome, kind: LossKind | None) -> None:
        self.end_ns = perf_counter_ns()
        self.sent_ns = self.sent_ns or self.end_ns
        self.outcome, self.error_kind = outcome, kind
        self._connection = None
        self._owner.ended(self)


Start = Callable[[RequestRun], None]
"""Begins a request on a connection, once there is one."""
