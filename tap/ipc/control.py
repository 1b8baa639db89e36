"""What the supervisor and a worker say to each other, over the socket that the worker was started with."""

import msgspec

from engines.dialect import DialectName
from tap.ipc.exchange import Injection


class WorkerSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """The first message to a worker: all it needs."""

    number: int
    """From 0; a worker that takes a dead one's place has its number."""
    workers: int
    listen_fd: int
    """The bound socket to serve on, inherited under this number."""
    upstreams: list[str]
    by_session: bool
    """Whether a session stays with its upstream; else each upstream has its turn."""
    counts_path: str
    """The file with all workers' counts."""
    recorder_socket: str
    admin_socket: str | None
    """Null: there is no admin process."""
    max_body_bytes: int
    queue_bytes: int
    """This worker's share."""
    keep_headers: list[str]
    """Request headers that records keep, in lower case."""
    inject: list[Injection]
    dialect: DialectName
    drain_s: float
    """How long requests in flight may go on if the supervisor is suddenly gone."""


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """New requests go to these upstreams from now on; removed ones finish what they have."""

    upstreams: list[str]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Take no new connections; what is in flight may go on for a while."""

    drain_s: float


class Cut(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End what is in flight now."""


class Drained(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker's last message: nothing is in flight, and the recorder's socket has all that it would take."""

    cut: int
    """Responses that were cut."""
