"""Messages between the tap's processes: length-prefixed msgpack over unix sockets."""

from typing import Literal

import msgspec

from engines.access import OPEN, Access
from engines.dialect import DialectName
from tracefile.records.schema import Engine, HashAlgorithm, Meta, Status
from wire.process import frame
from wire.tls import SYSTEM_TLS, Tls

Endpoint = str
"""API of a request, as ``recorded_endpoint`` names it: ``/v1/chat/completions``, ``/v1/messages`` …"""
Injection = Literal["usage", "token-ids"]


class Progress(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Counts of a trace, sent after a flush: records counted are in its files.

    They continue those of earlier recorders (``RecorderSetup.carry``), so the last message is the whole.
    """

    received: int = 0
    """Exchanges taken off sockets: each is recorded, sampled out or dropped."""
    recorded: int = 0
    hashed: int = 0
    prompt_counts_checked: int = 0
    """Records with both prompt ids and usage."""
    prompt_counts_matched: int = 0
    """Of these, records whose two counts are equal."""
    dropped: dict[str, int] = {}
    unhashed: dict[str, int] = {}
    sampled_out: int = 0
    """Exchanges of sessions outside the sample."""
    found: int | None = None
    """Records of earlier runs in a resumed trace, not among ``recorded``. Null: not counted yet."""
    epoch_ns: int | None = None
    """Monotonic clock at the trace's t = 0, an earlier run's if resumed. Null: not known yet."""
    segments: int = 0
    deleted: int = 0
    """Old segments deleted by ``--keep``."""
    uploaded: int = 0
    upload_failed: int = 0
    """Failed tries to upload a segment; it stays and is tried again."""
    refused_counts: int = 0
    """Records with a count of the client or the engine that cannot be true."""
    responses: dict[str, int] = {}
    """Complete responses of generations (``all``), ``streams`` among them, and those that lack something:
    ``streams_without_usage``, ``without_cached_tokens``, ``without_token_times``."""


class BoardSize(msgspec.Struct, array_like=True, frozen=True):
    """Size of the memory that workers share about upstreams."""

    workers: int = 1
    slots: int = 16
    keys: int = 1 << 10
    """Cells of an upstream's table, a power of two."""


class CacheFeed(msgspec.Struct, array_like=True, frozen=True):
    """An upstream's KV events."""

    upstream: str
    slot: int
    events: str
    """Address of its publisher, ``tcp://HOST:PORT``."""
    replay: str | None = None
    """Address at which it repeats batches that were missed. Null: it does not."""


class RecorderSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to a recorder."""

    trace: str
    overwrite: bool
    meta: Meta
    tokenizer: str
    """``ids``, ``bytes``, or a tokenizer's directory."""
    key_secret: bytes
    algorithm: HashAlgorithm
    block_size: int
    branches: bool = False
    """Records tell to the token where chains part."""
    hash_model: str | None
    """Model name at the start of each hash chain. Null: each request's own."""
    loras: list[str]
    epoch_ns: int
    """The relay's monotonic clock at t = 0."""
    socket: str = ""
    """Path of the unix socket for the workers' exchanges."""
    resume: bool = False
    """Continue the existing trace from its last whole record."""
    rotate_bytes: int | None = None
    """Close a segment at this size. Null: never."""
    rotate_s: float | None = None
    """Close a segment at this age. Null: never."""
    keep_s: float | None = None
    """Delete closed segments at this age. Null: never."""
    keep_bytes: int | None = None
    """Delete the oldest closed segments beyond this size of all. Null: never."""
    upload: str | None = None
    """fsspec URL for closed segments. Null: none."""
    sample: float = 1.0
    """Share of sessions to record."""
    keep_headers: list[str] = []
    """Request headers that records keep, in lower case."""
    max_body_bytes: int = 16 << 20
    """Largest body that is read, decoded."""
    dialect: DialectName = "vllm"
    engine_url: str | None = None
    """Engine for ``--tokenizer engine``. Null: no upstream known."""
    access: Access = OPEN
    """Keys, headers and TLS of calls to it."""
    admin_socket: str | None = None
    """Path of the unix socket for counters and records. Null: no admin process."""
    carry: Progress = msgspec.field(default_factory=Progress)
    """Counts of earlier recorders of the same trace."""
    cache_feeds: list[CacheFeed] = []
    """KV events that put the workers' tables right."""
    board_path: str = ""
    """The file with these tables."""
    board: BoardSize = BoardSize()
    route_bytes: int = 0
    """Bytes of a body that the policy sees, as hashes."""


class ExchangeCopy(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A request and its response: a bounded copy with the relay's times (monotonic ns), filled in as they pass."""

    endpoint: Endpoint
    arrival_ns: int
    """Request head complete."""
    end_ns: int = 0
    concurrency: int
    request_headers: dict[str, str]
    """Headers of ``KEPT_REQUEST_HEADERS`` and ``--keep-header``, names in lower case."""
    request_body: list[bytes] | None = []
    """De-chunked reads of the body. Null: larger than the bound."""
    http_status: int | None = None
    response_headers: dict[str, str] = {}
    """Headers of ``KEPT_RESPONSE_HEADERS``."""
    response_reads: list[tuple[int, bytes]] = []
    """Every de-chunked body read with its time, up to the bound."""
    response_whole: bool = True
    """False: only the beginning is there, the bound cut the rest."""
    last_reads: list[tuple[int, bytes]] = []
    """If the bound cut: the last reads, which hold the usage."""
    outcome: Status = "ok"
    error_kind: str | None = None
    upstream: str = ""
    """Origin of the upstream that served it. Empty: it reached none."""
    sent_ns: int | None = None
    """Time at which the request's head was written to the upstream. Null: never."""
    injected: list[Injection] = []
    """Additions of the relay to the request."""


KEPT_REQUEST_HEADERS = frozenset({b"x-request-id", b"x-session-id", b"x-dynamo-session-id", b"content-encoding"})
KEPT_RESPONSE_HEADERS = frozenset({b"content-type", b"content-encoding"})


class EngineChanged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The upstream is another engine from here on."""

    engine: Engine | None
    """Null: unknown."""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The child is ready: the recorder has its tokenizer and its trace open."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The child cannot start; ``reason`` is one line for the user."""

    reason: str


def encode_frame(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


class Certificate(msgspec.Struct, array_like=True, frozen=True):
    """Files of a server's certificate, read again on SIGHUP."""

    cert: str
    key: str | None
    """Null: in the same file."""


class UpstreamEntry(msgspec.Struct, array_like=True, frozen=True):
    """An upstream, and its state as the supervisor knows it."""

    url: str
    slot: int = 0
    """Place of its counts and keys in shared memory, the same while the tap runs."""
    draining: bool = False
    """It gets no new sessions."""
    stopped: bool = False
    """It gets no requests."""
    healthy: bool = True
    """By its checks; True without checks."""
    dialect: DialectName | None = None
    """Engine whose fields ``--inject`` may add to its requests. Null: none may be added."""


class WorkerSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to a worker."""

    number: int
    """From 0; the successor of a dead worker has its number."""
    workers: int
    listen_fd: int
    """The bound socket to serve on, inherited under this number."""
    certificate: Certificate | None = None
    """Null: plain HTTP."""
    upstreams: list[UpstreamEntry]
    tls: Tls = SYSTEM_TLS
    """Of connections to upstreams."""
    route: str
    """Policy that chooses among upstreams, with its settings."""
    capacity_blocks: int = 0
    """KV cache of an upstream, in keys of prompts. 0: not known."""
    route_bytes: int = 0
    """Bytes of a body that the policy may see, as hashes."""
    key_secret: bytes
    """Of the trace's ids: sessions are routed by their ids in records."""
    loras: list[str] = []
    """Names of models that are LoRA adapters."""
    eject_after: int = 0
    """Responses 5xx in a row after which an upstream gets no requests for a while. 0: never."""
    board_path: str
    """The file with the counts and keys of upstreams."""
    board: BoardSize
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
    """Additions to requests, as far as each upstream's dialect has them."""
    drain_s: float
    """Time for requests in flight if the supervisor is suddenly gone."""


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send new requests to these upstreams; removed ones finish theirs."""

    upstreams: list[UpstreamEntry]
    certificate: bool = False
    """Read the certificate again."""


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
    names: list[str] = []
    """Host names under which the pages are asked for, in lower case."""


class ServiceStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """State of the tap's processes and of the engine."""

    upstreams: list[str]
    """Origins of new requests."""
    draining_upstreams: list[str] = []
    """Those among them that get no new sessions."""
    stopped_upstreams: list[str] = []
    """Those among them that get no requests."""
    unhealthy_upstreams: list[str] = []
    """Those among them whose checks fail."""
    workers: int
    workers_up: int
    worker_restarts: int = 0
    recorder_up: bool = True
    recorder_restarts: int = 0
    offered: int = 0
    """Requests to be recorded so far, of all workers, dead ones included."""
    dropped: dict[str, int] = {}
    draining: bool = False
    """The tap is ending: no new connections."""
    engine: Engine | None = None
    """Null: unknown."""
