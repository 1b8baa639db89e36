"""Messages between a shard and its sender: orders with absolute times, and their results.

msgpack in frames, many at a time. Times are ``perf_counter_ns``, one clock for all processes of a machine.
"""

import msgspec

from loadgen.core.request import MOST_RESPONSE_BYTES
from wire.errors import LossKind, Outcome
from wire.tls import SYSTEM_TLS, Tls


class SenderSetup(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Shard → sender, first."""

    url: str
    warm: int
    parallel: int | None
    timeout_ns: int | None
    """From a request's start to its last byte; null: no limit."""
    tls: Tls = SYSTEM_TLS


class Order(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request and its time."""

    number: int
    at_ns: int
    data: bytes
    fills: bool = False
    """From ``at_ns`` on it takes the first free slot."""
    until_ns: int | None = None
    """Latest start; null: however late."""
    whole: bool = False
    """True if the response is not streamed: its first read is no token."""
    most_bytes: int = MOST_RESPONSE_BYTES
    """Response bytes from which on the request is given up."""


class Orders(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Shard → sender: more to send."""

    orders: list[Order]


class Halt(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Shard → sender: start nothing more, abort what is in flight; answered by ``Halted`` behind all of its ends."""

    kind: LossKind | None = None
    """Error of the aborted requests."""


class Connected(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Sender → shard, first: the connections are open."""


class Unreachable(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Sender → shard, first and last: no connection."""

    reason: str
    """The step that failed, and what was expected."""


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result of an order."""

    number: int
    scheduled_ns: int
    """Due time; with ``fills``: time of the free slot."""
    sent_ns: int
    """Just before its first byte was written; without a connection: time of the failure."""
    end_ns: int
    status: int | None
    """HTTP status; null: no response line came."""
    outcome: Outcome
    error_kind: str | None
    concurrency: int
    """Requests in flight at its start, itself included."""
    held: bool
    """True if it was due while no slot was free."""
    told_reads: int
    """Reads reported in a ``Pulse``."""
    reads: list[tuple[int, bytes]]
    """Body reads, with times taken first."""


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Sender → shard, once a turn of its loop at most: what ended, and how far it is."""

    ended: list[Ended]
    expired: list[int]
    """Orders not started: too late."""
    started: int
    """Orders in flight, ended or expired."""
    in_flight: int


class Pulse(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Sender → shard, a few times a second: how it is doing, and what streams in flight have done since the last."""

    started: int
    in_flight: int
    cpu_ns: int
    """CPU time of its process since its connections were open."""
    delays_ns: list[int]
    """Lateness of its timer, each time since."""
    first_reads_ns: list[int]
    gaps_ns: list[int]


class Halted(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Sender → shard: nothing is in flight, and nothing will be."""

    unsent: int = 0
    """Requests that were due, without a free slot."""


to_sender: "msgspec.msgpack.Decoder[SenderSetup | Orders | Halt]" = msgspec.msgpack.Decoder(SenderSetup | Orders | Halt)
from_sender: "msgspec.msgpack.Decoder[Connected | Unreachable | Batch | Pulse | Halted]" = msgspec.msgpack.Decoder(
    Connected | Unreachable | Batch | Pulse | Halted
)
encode = msgspec.msgpack.Encoder().encode
