"""Messages to the admin process: numbers of each process once a second.

No process waits for the admin process: frames beyond a bound are dropped. Numbers are totals since the
start of their process, so a lost frame costs a second.
"""

import contextlib
import socket
import time
from collections import deque
from itertools import islice
from typing import Final

import msgspec

from measure.histogram import HistogramCounts
from tap.ipc.exchange import Progress
from tracefile.records.schema import Status

PUSH_INTERVAL_S: Final = 1.0
RECONNECT_S: Final = 1.0
BACKLOG_BYTES: Final = 4 << 20
SEND_BUFFER_BYTES: Final = 1 << 20
SEND_FRAMES: Final = 32


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
    """Numbers of a worker since its start. An empty histogram may come without buckets."""

    worker: int
    """Number of the worker, the same after a restart."""
    pid: int
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
    response_head: HistogramCounts = msgspec.field(default_factory=lambda: HistogramCounts([]))
    """Seconds spent on a response's head, of a sample. Buckets: ``OVERHEAD_S``, here and below."""
    chunk: HistogramCounts = msgspec.field(default_factory=lambda: HistogramCounts([]))
    """Seconds from a read of a response body to its write to the client, of a sample."""
    upstreams: list[UpstreamStats] = []
    misrouted: dict[str, int] = {}
    """Requests for which the user's policy gave no upstream, by reason."""


class RequestCount(msgspec.Struct, array_like=True, frozen=True):
    """Count of records with this endpoint, outcome and upstream."""

    endpoint: str
    status: Status
    http_status: int
    """0: no response came."""
    upstream: str
    count: int


class CacheFeedStats(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of an upstream's KV events since the recorder's start."""

    upstream: str
    connected: bool
    batches: int
    gaps: int
    """Missed batches that nobody repeated: the cache counted as lost."""
    faults: int
    """Batches and events that could not be read."""
    blocks: int
    """Blocks that the upstream holds now."""
    unplaced: int
    """Blocks that our hashes could not name: salt, media, a block before that is unknown."""
    lag_s: float | None
    """From the engine's clock in the latest batch to its taking in. Null: none came."""


class RecorderStats(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """Numbers of the recorder. ``progress`` continues across restarts, the rest is since the start of the process."""

    pid: int
    progress: Progress
    writing: bool = True
    """The last flush reached the files."""
    requests: list[RequestCount] = []
    ttft: HistogramCounts = msgspec.field(default_factory=lambda: HistogramCounts([]))
    """Seconds to the first token. Buckets: ``WAIT_S``."""
    gaps: HistogramCounts = msgspec.field(default_factory=lambda: HistogramCounts([]))
    """Seconds between reads with tokens. Buckets: ``GAP_S``."""
    request_head: HistogramCounts = msgspec.field(default_factory=lambda: HistogramCounts([]))
    """Seconds from a request's head to its write upstream, with connecting. Buckets: ``OVERHEAD_S``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cache_feeds: list[CacheFeedStats] = []


class FeedSender:
    """Frames to the admin process's socket; never blocks, needs no event loop. Refused bytes go with the next frame."""

    __slots__ = ("_first_sent", "_held_bytes", "_outbox", "_path", "_socket", "_tried_at")

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._outbox: deque[bytes] = deque()
        self._first_sent = 0
        """Bytes of the first frame already sent."""
        self._held_bytes = 0
        self._tried_at = float("-inf")

    def offer(self, frame: bytes) -> bool:
        """Send a frame, or keep it for the next time; False if it was dropped."""
        if self._socket is None:
            self._connect()
        if self._socket is None or self._held_bytes + len(frame) > BACKLOG_BYTES:
            return False
        self._outbox.append(frame)
        self._held_bytes += len(frame)
        self.flush()
        return self._socket is not None

    def flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._outbox:
                first = memoryview(self._outbox[0])[self._first_sent :]
                self._sent(self._socket.sendmsg([first, *islice(self._outbox, 1, SEND_FRAMES)]))
        except BlockingIOError:
            return
        except OSError:  # the admin process is gone; its successor needs whole and current frames
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outbox.clear()
        self._first_sent = self._held_bytes = 0

    def _sent(self, taken: int) -> None:
        self._held_bytes -= taken
        taken += self._first_sent
        while self._outbox and taken >= len(self._outbox[0]):
            taken -= len(self._outbox.popleft())
        self._first_sent = taken

    def _connect(self) -> None:
        now = time.monotonic()
        if now - self._tried_at < RECONNECT_S:
            return
        self._tried_at = now
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:  # not there yet, gone, or its queue of connections is full
            sock.close()
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = sock
