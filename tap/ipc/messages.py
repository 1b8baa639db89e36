"""Messages between the tap's processes: length-prefixed msgpack over sockets."""

import asyncio
import sys
from typing import Any

import msgspec

from engines.dialect import DialectName
from measure.histogram import HistogramCounts
from tap.ipc.settings import Injection, Settings
from tap.ipc.sharedmemory import BoardSize
from tracefile.records.schema import Engine, Meta, Status
from wire.process import FrameSocket, frame

Endpoint = str
"""API of a request, as ``recorded_endpoint`` names it: ``/v1/chat/completions``, ``/v1/messages`` …"""
STATS_INTERVAL_S = 1.0
"""Between two reports of a process for /metrics."""


def say(text: str) -> None:
    """Print a line on stderr, at once: a process may be killed next."""
    print(f"tap: {text}", file=sys.stderr, flush=True)


def encode_frame(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


class Channel(FrameSocket):
    """End of a socket between the supervisor and a child. Received messages wait in ``messages``; null is the end."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Any]") -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        super().__init__(
            lambda payload: self.messages.put_nowait(decoder.decode(payload)), lambda: self.messages.put_nowait(None)
        )

    def post(self, message: msgspec.Struct) -> None:
        self.send(msgspec.msgpack.encode(message))


def no_counts() -> HistogramCounts:
    """Return an empty histogram, without its buckets."""
    return HistogramCounts([])


class RequestCount(msgspec.Struct, array_like=True, frozen=True):
    """Count of records with this endpoint, outcome and upstream."""

    endpoint: str
    status: Status
    http_status: int
    """0: no response came."""
    upstream: str
    count: int


class RecordNumbers(msgspec.Struct, array_like=True, kw_only=True):
    """Numbers of a recorder's records since the start of the process."""

    requests: list[RequestCount] = []
    ttft: HistogramCounts = msgspec.field(default_factory=no_counts)
    """Seconds to the first token. Buckets: ``WAIT_S``."""
    gaps: HistogramCounts = msgspec.field(default_factory=no_counts)
    """Seconds between reads with tokens. Buckets: ``GAP_S``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Progress(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Counts of a trace, sent after a flush: records counted are in its files.

    They continue those of earlier recorders (``RecorderSetup.carry``), so the last message is the whole.
    """

    received: int = 0
    """Exchanges taken off sockets: each is recorded or dropped."""
    recorded: int = 0
    hashed: int = 0
    prompt_counts_checked: int = 0
    """Records with both prompt ids and usage."""
    prompt_counts_matched: int = 0
    """Of these, records whose two counts are equal."""
    dropped: dict[str, int] = {}
    unhashed: dict[str, int] = {}
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
    writing: bool = True
    """The last flush reached the files."""
    numbers: RecordNumbers = msgspec.field(default_factory=RecordNumbers)


class RecorderSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to a recorder."""

    settings: Settings
    socket: str
    """Path of the unix socket for the workers' exchanges. Empty: none."""
    meta: Meta
    key_secret: bytes
    dialect: DialectName
    engine_url: str
    """Engine for ``--tokenizer engine``, until an upstream has served a request."""
    epoch_ns: int
    """The relay's monotonic clock at t = 0."""
    carry: Progress = msgspec.field(default_factory=Progress)
    """Counts of earlier recorders of the same trace."""

    @property
    def block_size(self) -> int:
        assert self.meta.block_size is not None
        return self.meta.block_size

    @property
    def branches(self) -> bool:
        """True: records tell to the token where chains part."""
        return self.meta.hash is not None and bool(self.meta.hash.branches)


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
    """If the bound cut: the last reads, which hold a stream's usage."""
    outcome: Status = "ok"
    error_kind: str | None = None
    upstream: str = ""
    """Origin of the upstream that served it. Empty: it reached none."""
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


class UpstreamEntry(msgspec.Struct, array_like=True, frozen=True):
    """An upstream, and its state as the supervisor knows it."""

    url: str
    slot: int = 0
    """Index of its counts and keys in shared memory, the same while the tap runs."""
    dialect: DialectName | None = None
    """Engine whose fields ``--inject`` may add to its requests. Null: none may be added."""


class WorkerSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """First message to a worker."""

    settings: Settings
    folder: str
    """Folder of the processes' sockets and shared memory."""
    number: int
    """From 0; the successor of a dead worker has its number."""
    listen_fd: int
    """The bound socket to serve on, inherited under this number."""
    upstreams: list[UpstreamEntry]
    capacity_blocks: int = 0
    """KV cache of an upstream, in keys of prompts. 0: not known."""
    key_secret: bytes
    """Of the trace's ids: sessions are routed by their ids in records."""
    board: BoardSize


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send new requests to these upstreams; removed ones finish theirs."""

    upstreams: list[UpstreamEntry]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Take no new connections; requests in flight have ``drain_s``."""

    drain_s: float


class Cut(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End the requests in flight now."""


class Drained(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A worker's last message: nothing is in flight, and the recorder's socket has taken all it would."""

    cut: int
    """Responses that were cut."""


class UpstreamStats(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of an upstream, as one worker counts them since its start."""

    upstream: str
    requests: int = 0
    in_flight: int = 0
    ejected: bool = False
    ejections: int = 0
    """Times that it got no requests for a while after failures."""
    prompt_bytes: int = 0
    """Bytes of prompts' starts sent there that the router hashed."""
    known_bytes: int = 0
    """Leading bytes of them that the router had sent there before."""


class WorkerStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """Numbers of a worker since its start."""

    worker: int
    """Number of the worker, the same after a restart."""
    in_flight: int = 0
    """Recorded requests that have not ended."""
    connections: int = 0
    relayed: int = 0
    bytes_in: int = 0
    """Bytes of request bodies; those of recorded requests count at their end."""
    bytes_out: int = 0
    """Bytes of response bodies, likewise."""
    queue_bytes: int = 0
    """Bytes of copies in flight and of frames that the recorder has not taken."""
    queue_limit_bytes: int = 0
    loop_delay_s: float = 0.0
    """Largest delay of the event loop since the last push."""
    upstreams: list[UpstreamStats] = []
    misrouted: dict[str, int] = {}
    """Requests for which the policy raised, by the exception's type."""
