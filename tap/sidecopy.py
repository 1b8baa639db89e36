"""The side copy of an exchange while it passes: references to the reads, within bounds, no work on their content."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tap.exchange import KEPT_REQUEST_HEADERS, KEPT_RESPONSE_HEADERS, Endpoint, ExchangeCopy, Injection
from tracefile.schema import Status
from wire.head import Headers

LAST_READS = 8
"""Reads kept of the end of a response too large to copy: its usage is in them."""
READ_OVERHEAD_BYTES = 120
"""What a read costs in memory beside its bytes."""


@dataclass(slots=True)
class CopyBudget:
    """Bytes that all copies in flight may hold together; over it, copies are given up, never the traffic."""

    limit_bytes: int
    held_bytes: int = 0


class SideCopy:
    """One exchange's copy. Once given up it holds nothing, and ``dropped`` says why."""

    __slots__ = (
        "_arrival_ns",
        "_body",
        "_body_bytes",
        "_budget",
        "_concurrency",
        "_endpoint",
        "_held",
        "_http_status",
        "_last_reads",
        "_max_body_bytes",
        "_reads",
        "_request_headers",
        "_response_bytes",
        "_response_headers",
        "_response_whole",
        "_sent_ns",
        "_upstream",
        "dropped",
        "injected",
    )

    def __init__(
        self,
        budget: CopyBudget,
        max_body_bytes: int,
        *,
        endpoint: Endpoint,
        arrival_ns: int,
        concurrency: int,
        headers: Headers,
        names: Sequence[bytes],
        kept_headers: frozenset[bytes] = KEPT_REQUEST_HEADERS,
    ) -> None:
        self._budget, self._max_body_bytes = budget, max_body_bytes
        self._endpoint: Endpoint = endpoint
        self._arrival_ns, self._concurrency = arrival_ns, concurrency
        self._request_headers = _kept(headers, names, kept_headers)
        self._body: list[bytes] | None = []
        self._body_bytes = 0
        self._http_status: int | None = None
        self._response_headers: dict[str, str] = {}
        self._reads: list[tuple[int, bytes]] = []
        self._response_bytes = 0
        self._response_whole = True
        self._last_reads: deque[tuple[int, bytes]] = deque(maxlen=LAST_READS)
        self._upstream = ""
        self._sent_ns: int | None = None
        self.injected: list[Injection] = []
        """What was added to the request."""
        self._held = 0
        self.dropped: str | None = None

    def request_body(self, data: bytes) -> None:
        """Keep a de-chunked piece of the request body, or give the body up for being too large."""
        self._body_bytes += len(data)
        if self._body is None or self.dropped is not None:
            return
        if self._body_bytes > self._max_body_bytes:
            self._release(self._body_bytes - len(data) + READ_OVERHEAD_BYTES * len(self._body))
            self._body = None
            return
        self._body.append(data)
        self._hold(len(data) + READ_OVERHEAD_BYTES)

    def sent_to(self, upstream: str, at_ns: int) -> None:
        """Note who serves the request, and when its head was written there."""
        self._upstream, self._sent_ns = upstream, at_ns

    def response_head(self, status: int, headers: Headers, names: Sequence[bytes]) -> None:
        """Keep the final response head's status and the few headers that parsing needs."""
        self._http_status = status
        self._response_headers = _kept(headers, names, KEPT_RESPONSE_HEADERS)

    def response_body(self, at_ns: int, data: bytes) -> None:
        """Keep a de-chunked read with its time; beyond the bound only the last few."""
        self._response_bytes += len(data)
        if self.dropped is not None or not data:
            return
        if self._response_bytes > self._max_body_bytes:
            self._response_whole = False
            self._last_reads.append((at_ns, data))
            return
        self._reads.append((at_ns, data))
        self._hold(len(data) + READ_OVERHEAD_BYTES)

    @property
    def body_bytes(self) -> tuple[int, int]:
        """Bytes of the request's and the response's body that came, copied or not."""
        return self._body_bytes, self._response_bytes

    def finish(self, end_ns: int, outcome: Status, error_kind: str | None) -> ExchangeCopy:
        """What the recorder gets; the copy holds nothing after it."""
        exchange = ExchangeCopy(
            endpoint=self._endpoint,
            arrival_ns=self._arrival_ns,
            end_ns=end_ns,
            concurrency=self._concurrency,
            request_headers=self._request_headers,
            request_body=self._body,
            http_status=self._http_status,
            response_headers=self._response_headers,
            response_reads=self._reads,
            response_whole=self._response_whole,
            last_reads=list(self._last_reads),
            outcome=outcome,
            error_kind=error_kind,
            upstream=self._upstream,
            sent_ns=self._sent_ns,
            injected=self.injected,
        )
        self._release(self._held)
        return exchange

    def give_up(self, reason: str) -> None:
        """Hold nothing any more; the traffic goes on."""
        self.dropped = reason
        self._body = None
        self._reads = []
        self._last_reads.clear()
        self._release(self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._budget.held_bytes += size
        if self._budget.held_bytes > self._budget.limit_bytes:
            self.give_up("queue_full")

    def _release(self, size: int) -> None:
        self._held -= size
        self._budget.held_bytes -= size


def _kept(headers: Headers, names: Sequence[bytes], wanted: frozenset[bytes]) -> dict[str, str]:
    """The first of each wanted header. ``names``: the headers' names in lower case, parallel to them."""
    kept: dict[str, str] = {}
    if not wanted.isdisjoint(names):
        for lower, (_, value) in zip(names, headers, strict=True):
            if lower in wanted:
                kept.setdefault(lower.decode("ascii"), value.decode("latin-1"))
    return kept
