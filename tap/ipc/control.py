"""Messages between the supervisor and a worker or the admin process, over the socket given at their start."""

import msgspec

from engines.dialect import DialectName
from tap.ipc.exchange import Injection
from tracefile.records.schema import Engine


class WorkerSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to a worker."""

    number: int
    """From 0; the successor of a dead worker has its number."""
    workers: int
    listen_fd: int
    """The bound socket to serve on, inherited under this number."""
    upstreams: list[str]
    by_session: bool
    """True: a session stays with its upstream. False: round robin."""
    counts_path: str
    """The file with all workers' counts."""
    recorder_socket: str
    admin_socket: str | None
    """Null: no admin process."""
    max_body_bytes: int
    queue_bytes: int
    """This worker's share."""
    keep_headers: list[str]
    """Request headers that records keep, in lower case."""
    inject: list[Injection]
    dialect: DialectName
    drain_s: float
    """Time for requests in flight if the supervisor is suddenly gone."""


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send new requests to these upstreams; removed upstreams finish theirs."""

    upstreams: list[str]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Take no new connections; requests in flight have ``drain_s``."""

    drain_s: float


class Cut(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End the requests in flight now."""


class Drained(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A worker's last message: nothing is in flight, and the recorder's socket has taken all it would."""

    cut: int
    """Responses that were cut."""


class AdminSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to the admin process."""

    listen_fd: int
    """The bound TCP socket to serve pages on, inherited."""
    feed_socket: str
    """Path of the socket on which it takes the other processes' numbers."""
    trace: str
    """Path, for the heading of the page."""
    block_size: int
    """Tokens in one hashed block."""


class ServiceStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """State of the tap's processes and of the engine."""

    upstreams: list[str]
    """Origins of new requests."""
    workers: int
    workers_up: int
    worker_restarts: int = 0
    recorder_up: bool = True
    recorder_restarts: int = 0
    offered: int = 0
    """Requests to be recorded so far, of all workers, dead ones included."""
    dropped: dict[str, int] = {}
    """Requests without a record, by reason."""
    draining: bool = False
    """The tap is ending: no new connections."""
    engine: Engine | None = None
    """Null: unknown."""
