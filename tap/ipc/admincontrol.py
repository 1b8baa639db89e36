"""What the supervisor and the admin process say to each other, over the socket that the process was started with.

The supervisor sends ``AdminSetup``, hears ``Ready`` or ``Refused`` (as of a recorder), then sends ``ServiceStats``
once a second and on every change. When it closes its side, the process leaves.
"""

import msgspec

from tracefile.records.schema import Engine


class AdminSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """The first message: all that the process needs."""

    listen_fd: int
    """The bound TCP socket to serve pages on, inherited."""
    feed_socket: str
    """Path to listen on for what the other processes push."""
    trace: str
    """Where it is written, for the page's heading."""
    block_size: int
    """Tokens in one hashed block."""


class ServiceStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """What the supervisor knows of the tap's processes and of the engine."""

    upstreams: list[str]
    """Origins that requests go to now."""
    workers: int
    """How many there are to be."""
    workers_up: int
    worker_restarts: int = 0
    recorder_up: bool = True
    recorder_restarts: int = 0
    offered: int = 0
    """Requests that were to be recorded, all workers' together, dead ones' included."""
    dropped: dict[str, int] = {}
    """Those that have no record, by reason, whoever gave them up."""
    draining: bool = False
    """The tap is ending: no new connections."""
    engine: Engine | None = None
    """Null: nothing is known of it."""
