"""HTTP exchange of a request and its response: connection events, with a time stamp of every read for TTFT and ITL."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from loadgen.core.job import Send
from loadgen.core.request import MOST_RESPONSE_BYTES, PlannedRequest
from wire.client.connection import ResponseHead, ServerConnection
from wire.errors import LossKind, Outcome

READ_BYTES = 128
"""Memory of a read besides its bytes."""
BEGINNING_BYTES = 64 << 10
"""Bytes kept of a response aborted for its length."""


@dataclass(slots=True, eq=False)
class Order:
    """Send with its absolute time; ordered by time, then by plan order."""

    at_ns: int
    number: int
    send: Send
    parent_end_ms: float | None
    """End of its parent request, on the trace's clock; null: a root."""
    until_ns: int | None = None
    """Latest start; null: no limit."""
    request: PlannedRequest | None = None
    """Null: not built yet."""
    data: bytes = b""
    """Serialised request."""
    most_bytes: int = MOST_RESPONSE_BYTES
    """Limit of the response in bytes; a longer response is aborted."""

    def __lt__(self, other: "Order") -> bool:
        return (self.at_ns, self.number) < (other.at_ns, other.number)

    @property
    def fills(self) -> bool:
        """True if it is sent as soon as a slot is free from ``at_ns`` on."""
        return self.send.due_ms is None


OnEnd = Callable[["Exchange"], None]


class Exchange:
    """Exchange of an order from its start to its end: receives the response's reads, which give its latencies."""

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
        """``on_end``: the connection is free; ``on_stale``: the server had closed the connection, send again."""
        self.order = order
        self.scheduled_ns = started_ns if order.fills else order.at_ns
        self.started_ns = started_ns
        self.concurrency = concurrency
        """Requests in flight at its start, itself included."""
        self.held = held
        """True if no slot was free at its due time."""
        self.sent_ns = 0
        """Just before its first byte was written; without a connection: time of the failure."""
        self.end_ns = 0
        self.status: int | None = None
        """HTTP status; null: no status line received."""
        self.outcome: Outcome = "ok"
        self.error_kind: LossKind | None = None
        self.reads: list[tuple[int, bytes]] = []
        """Body reads, time-stamped before processing."""
        self.buffered_bytes = 0
        self._on_end, self._on_stale = on_end, on_stale
        self._connection: ServerConnection | None = None
        self._retried = False

    def begin(self, connection: ServerConnection) -> None:
        """Send on this connection. A retry keeps the first send time: its latency includes the server's delay."""
        self._connection = connection
        self.sent_ns = self.sent_ns or perf_counter_ns()
        connection.start(self.order.data, self)

    def give_up(self, outcome: Outcome, kind: LossKind | None) -> None:
        if self._connection is not None:
            self._connection.abort()
        self._end(outcome, kind)

    # Callbacks of the connection.

    def response_head(self, head: ResponseHead) -> None:
        if not head.informational:
            self.status = head.status
            self.order.data = b""  # no retry from here on

    def response_body(self, at_ns: int, raw: bytes, data: bytes) -> None:
        """Store a read with its time stamp, unless it has only framing; abort a response over its limit."""
        del raw
        if not data:
            return
        self.buffered_bytes += READ_BYTES + len(data)
        if self.buffered_bytes <= self.order.most_bytes:
            self.reads.append((at_ns, data))
            return
        sizes = itertools.accumulate(len(data) for _, data in self.reads)
        # Only the beginning: parsing millions of events would block the event loop.
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
        """Nothing to do: the transport has buffered the complete request."""

    def resume_request(self) -> None:
        """See ``pause_request``."""

    def _end(self, outcome: Outcome, kind: LossKind | None) -> None:
        self.end_ns = perf_counter_ns()
        self.sent_ns = self.sent_ns or self.end_ns
        self.outcome, self.error_kind = outcome, kind
        self._connection = None
        self._on_end(self)
