"""Exchange of a request and its response: its connection's events, with the time of every read."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from loadgen.core.job import Send
from loadgen.core.request import MOST_RESPONSE_BYTES, PlannedRequest
from wire.client.connection import ResponseHead, ServerConnection
from wire.errors import LossKind, Outcome

READ_BYTES = 128
"""Memory of a read beside its bytes."""
BEGINNING_BYTES = 64 << 10
"""Bytes kept of a response that is given up for its length."""


@dataclass(slots=True, eq=False)
class Order:
    """A send with its absolute time; ordered by time, then by the order it was planned in."""

    at_ns: int
    number: int
    send: Send
    parent_end_ms: float | None
    """End of the request that it follows, on the trace's clock; null: a root."""
    until_ns: int | None = None
    """Latest start; null: however late."""
    request: PlannedRequest | None = None
    """Null: not built yet."""
    data: bytes = b""
    """The request as it is written."""
    most_bytes: int = MOST_RESPONSE_BYTES
    """Response bytes from which on it is given up."""

    def __lt__(self, other: "Order") -> bool:
        return (self.at_ns, self.number) < (other.at_ns, other.number)

    @property
    def fills(self) -> bool:
        """True if it takes the first free slot from ``at_ns`` on."""
        return self.send.due_ms is None


OnEnd = Callable[["Exchange"], None]


class Exchange:
    """An order from its start to its end: the sink of its response."""

    __slots__ = (
        "_connection",
        "_on_end",
        "_on_stale",
        "_retried",
        "buffered_bytes",
        "concurrency",
        "end_ns",
        "error_kind",
        "held",
        "order",
        "outcome",
        "reads",
        "scheduled_ns",
        "sent_ns",
        "started_ns",
        "status",
    )

    def __init__(
        self, order: Order, on_end: OnEnd, on_stale: OnEnd, *, started_ns: int, concurrency: int, held: bool
    ) -> None:
        """``on_end``: its connection is free; ``on_stale``: the server had closed the connection, send again."""
        self.order = order
        self.scheduled_ns = started_ns if order.fills else order.at_ns
        self.started_ns = started_ns
        self.concurrency = concurrency
        """Requests in flight at its start, itself included."""
        self.held = held
        """True if it was due while no slot was free."""
        self.sent_ns = 0
        """Just before its first byte was written; without a connection: time of the failure."""
        self.end_ns = 0
        self.status: int | None = None
        """HTTP status; null: no response line came."""
        self.outcome: Outcome = "ok"
        self.error_kind: LossKind | None = None
        self.reads: list[tuple[int, bytes]] = []
        """Body reads, with times taken first."""
        self.buffered_bytes = 0
        self._on_end, self._on_stale = on_end, on_stale
        self._connection: ServerConnection | None = None
        self._retried = False

    def begin(self, connection: ServerConnection) -> None:
        """A second try keeps the first send time, because the server caused the delay."""
        self._connection = connection
        self.sent_ns = self.sent_ns or perf_counter_ns()
        connection.start(self.order.data, self)

    def give_up(self, outcome: Outcome, kind: LossKind | None) -> None:
        if self._connection is not None:
            self._connection.abort()
        self._end(outcome, kind)

    # What the connection calls.

    def response_head(self, head: ResponseHead) -> None:
        if not head.informational:
            self.status = head.status
            self.order.data = b""  # it will not be sent again

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Keep a read, unless it held only framing; give up a response beyond all that was asked for."""
        del raw
        if not data:
            return
        self.buffered_bytes += READ_BYTES + len(data)
        if self.buffered_bytes <= self.order.most_bytes:
            self.reads.append((at_ns, data))
            return
        sizes = itertools.accumulate(len(data) for _, data in self.reads)
        # The beginning alone: to parse millions of events would stop the clock.
        self.reads = [read for read, size in zip(self.reads, sizes, strict=True) if size <= BEGINNING_BYTES]
        self.give_up("error", "response_too_large")

    def response_end(self) -> None:
        self._end("ok", None)

    def response_lost(self, kind: LossKind) -> None:
        assert self._connection is not None
        if kind == "upstream_closed" and self._connection.stale and not self._retried:
            self._retried = True
            self._connection = None
            self._on_stale(self)
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
        self._on_end(self)
