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
"""API of a request, from ``recorded_endpoint``: ``/v1/chat/completions``, ``/v1/messages`` …"""
STATS_INTERVAL_S = 1.0
"""Interval of a process's reports for /metrics."""


def log_line(text: str) -> None:
    """Print a line on stderr and flush: the process may be killed next."""
    print(f"tap: {text}", file=sys.stderr, flush=True)


def encode_frame(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


class Channel(FrameSocket):
    """Socket between the supervisor and a child. Received messages are queued in ``messages``; None: end of stream."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Any]") -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        super().__init__(
            lambda payload: self.messages.put_nowait(decoder.decode(payload)), lambda: self.messages.put_nowait(None)
        )

    def post(self, message: msgspec.Struct) -> None:
        self.send(msgspec.msgpack.encode(message))


def no_counts() -> HistogramCounts:
    """Return an empty latency histogram, without buckets."""
    return HistogramCounts([])


class RequestCount(msgspec.Struct, array_like=True, frozen=True):
    """Number of records by endpoint, outcome and upstream."""

    endpoint: str
    status: Status
    http_status: int
    """0: no response."""
    upstream: str
    count: int


class RecordNumbers(msgspec.Struct, array_like=True, kw_only=True):
    """Request counts, TTFT and ITL histograms and token totals since the start of the recorder process."""

    requests: list[RequestCount] = []
    ttft: HistogramCounts = msgspec.field(default_factory=no_counts)
    """TTFT, in s. Buckets: ``WAIT_S``."""
    gaps: HistogramCounts = msgspec.field(default_factory=no_counts)
    """ITL: gaps between reads with tokens, in s. Buckets: ``GAP_S``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Progress(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Counts of a trace, sent after a flush: counted records are in the files.

    Counts continue the counts of earlier recorders (``RecorderSetup.carry``), so that the last message is the total.
    """

    received: int = 0
    """Exchanges received from workers: each is recorded or dropped."""
    recorded: int = 0
    hashed: int = 0
    prompt_counts_checked: int = 0
    """Records with both prompt token ids and usage."""
    prompt_counts_matched: int = 0
    """Checked records whose prompt token ids equal the usage in number."""
    dropped: dict[str, int] = {}
    unhashed: dict[str, int] = {}
    earlier_records: int | None = None
    """Records of earlier runs in a resumed trace, not included in ``recorded``. None: not counted yet."""
    epoch_ns: int | None = None
    """Monotonic clock at the trace's t = 0. None: not known yet."""
    segments: int = 0
    deleted: int = 0
    """Segments deleted by ``--keep``."""
    uploaded: int = 0
    upload_failed: int = 0
    """Failed upload attempts; uploads are retried."""
    writing: bool = True
    """True: the last flush succeeded."""
    numbers: RecordNumbers = msgspec.field(default_factory=RecordNumbers)


class RecorderSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """Setup message of a recorder: settings, hash key, block size and trace header."""

    settings: Settings
    socket: str
    """Path of the unix socket for the workers. Empty: no workers."""
    meta: Meta
    key_secret: bytes
    dialect: DialectName
    engine_url: str
    """Engine of ``--tokenizer engine``, until an upstream has served a request."""
    epoch_ns: int
    """Monotonic clock of the workers at t = 0."""
    carry: Progress = msgspec.field(default_factory=Progress)
    """Counts of earlier recorders of the same trace."""

    @property
    def block_size(self) -> int:
        assert self.meta.block_size is not None
        return self.meta.block_size

    @property
    def branches(self) -> bool:
        """True: records have the token position where a prompt diverges within a block."""
        return self.meta.hash is not None and bool(self.meta.hash.branches)


class CapturedExchange(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Captured request and response, with the arrival time (monotonic ns) of every read for TTFT and ITL."""

    endpoint: Endpoint
    arrival_ns: int
    """Time at which the request head was complete: start of TTFT and E2E latency."""
    end_ns: int = 0
    concurrency: int
    request_headers: dict[str, str]
    """Headers of ``RECORDED_REQUEST_HEADERS`` and ``--keep-header``, names in lower case."""
    request_body: list[bytes] | None = []
    """De-chunked reads of the body. None: beyond the capture limit."""
    http_status: int | None = None
    response_headers: dict[str, str] = {}
    """Headers of ``RECORDED_RESPONSE_HEADERS``."""
    response_reads: list[tuple[int, bytes]] = []
    """De-chunked body reads with arrival times, up to the capture limit; ``wire.completion`` finds the first token."""
    response_complete: bool = True
    """False: ``response_reads`` ends at the capture limit."""
    last_reads: list[tuple[int, bytes]] = []
    """Last reads of a response beyond the capture limit; they hold a stream's usage."""
    outcome: Status = "ok"
    error_kind: str | None = None
    upstream: str = ""
    """Origin of the upstream that served the request. Empty: not connected."""
    injected: list[Injection] = []
    """Fields that ``--inject`` added to the request."""


RECORDED_REQUEST_HEADERS = frozenset({b"x-request-id", b"x-session-id", b"x-dynamo-session-id", b"content-encoding"})
RECORDED_RESPONSE_HEADERS = frozenset({b"content-type", b"content-encoding"})


class EngineChanged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Change of the engine's version or KV cache settings, for the trace's header."""

    engine: Engine | None
    """None: unknown."""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The child is ready; a recorder has loaded its tokenizer and opened the trace."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The child cannot start; ``reason``: one line for the user."""

    reason: str


class UpstreamEntry(msgspec.Struct, array_like=True, frozen=True):
    """Upstream with its slot in shared memory and its dialect."""

    url: str
    slot: int = 0
    """Index of its load cells and prefix table in shared memory; constant while the tap runs."""
    dialect: DialectName | None = None
    """Dialect for ``--inject``. None: no fields are added."""


class WorkerSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """Setup message of a worker: settings, upstreams, listening socket."""

    settings: Settings
    folder: str
    """Folder of the sockets and shared memory."""
    number: int
    """Number of the worker, from 0; kept after a restart."""
    listen_fd: int
    """Inherited file descriptor of the listening socket."""
    upstreams: list[UpstreamEntry]
    capacity_blocks: int = 0
    """KV cache size of an upstream, in prefix blocks. 0: unknown."""
    key_secret: bytes
    """Hash key of the trace: sessions are routed by their recorded ids."""
    board: BoardSize


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Replace the upstreams; removed upstreams finish their requests."""

    upstreams: list[UpstreamEntry]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Accept no new connections; requests in flight have ``drain_s`` to finish."""

    drain_s: float


class Cut(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Abort the requests in flight."""


class Drained(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Last message of a worker: no requests are in flight, and the captures were sent to the recorder."""

    cut: int
    """Number of aborted responses."""


class UpstreamStats(msgspec.Struct, array_like=True, frozen=True):
    """Requests, ejections and prefix hits of an upstream, counted by one worker since its start."""

    upstream: str
    requests: int = 0
    in_flight: int = 0
    ejected: bool = False
    ejections: int = 0
    """Number of ejections after failures."""
    prompt_bytes: int = 0
    """Bytes of prompt prefixes that routing hashed."""
    hit_bytes: int = 0
    """Bytes of prompt prefixes that were sent to the upstream before (prefix hits)."""


class WorkerStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """Counters and gauges of a worker since its start."""

    worker: int
    """Number of the worker, kept after a restart."""
    in_flight: int = 0
    """Recorded requests in flight."""
    connections: int = 0
    relayed: int = 0
    bytes_in: int = 0
    """Bytes of request bodies; bodies of recorded requests are added when the request ends."""
    bytes_out: int = 0
    """Bytes of response bodies; as ``bytes_in``."""
    queue_bytes: int = 0
    """Memory of captures in flight and of frames queued for the recorder."""
    queue_limit_bytes: int = 0
    loop_delay_s: float = 0.0
    """Largest event loop delay since the last report."""
    upstreams: list[UpstreamStats] = []
    misrouted: dict[str, int] = {}
    """Exceptions of the routing policy, by type."""
