"""What crosses between the tap's processes and its recorder: messages as length-prefixed msgpack over unix sockets."""

from typing import Literal

import msgspec

from engines.dialect import DialectName
from tracefile.records.schema import Engine, HashAlgorithm, Meta, Status
from wire.process import frame

Endpoint = str
"""The API that a request speaks, as ``recorded_endpoint`` names it: ``/v1/chat/completions``, ``/v1/messages`` …"""
Injection = Literal["usage", "token-ids"]


class Progress(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A trace's counts, sent after a flush: what is counted as recorded is in its files.

    They go on where the recorder before left off (``RecorderSetup.carry``), so that the last one heard is the whole.
    """

    received: int = 0
    """Exchanges taken off sockets: each is recorded, sampled out or dropped below."""
    recorded: int = 0
    hashed: int = 0
    """Records with block hashes."""
    prompt_counts_checked: int = 0
    """Records whose prompt ids and whose usage are both known."""
    prompt_counts_matched: int = 0
    """Those of them where the two counts are equal."""
    dropped: dict[str, int] = {}
    """Exchanges without a record, by reason."""
    unhashed: dict[str, int] = {}
    """Records without hashes, by reason."""
    sampled_out: int = 0
    """Exchanges of sessions that the sample leaves out."""
    found: int | None = None
    """Records that earlier runs had left in the trace, which this one resumed; not among ``recorded``. Null: no
    recorder has looked yet."""
    epoch_ns: int | None = None
    """The monotonic clock at the trace's t = 0: an earlier run's, if this one resumed it. Null: not known yet."""
    segments: int = 0
    """Files that the trace is made of so far."""
    uploaded: int = 0
    """Segments that are where ``--upload`` said."""
    upload_failed: int = 0
    """Tries to send a segment that failed; it stays and is tried again."""


class RecorderSetup(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """The first message to a recorder process: all it needs, so that nothing secret is on its command line."""

    trace: str
    overwrite: bool
    meta: Meta
    tokenizer: str
    """``ids``, ``bytes``, or a tokenizer's directory."""
    key_secret: bytes
    algorithm: HashAlgorithm
    block_size: int
    hash_model: str | None
    """The model name every chain starts from. Null: each request's own."""
    loras: list[str]
    """Model names that select an adapter."""
    epoch_ns: int
    """The relay's monotonic clock at t = 0."""
    socket: str = ""
    """Path of the unix socket on which it takes the workers' exchanges."""
    resume: bool = False
    """Go on with the trace that is there, salvaging what its last writer left whole."""
    rotate_bytes: int | None = None
    """Close a segment at this size. Null: at none."""
    rotate_s: float | None = None
    """Close a segment at this age. Null: at none."""
    upload: str | None = None
    """Where closed segments go, as a URL for fsspec. Null: nowhere."""
    sample: float = 1.0
    """Share of sessions to record."""
    keep_headers: list[str] = []
    """Request headers that records keep, in lower case."""
    inject: list[Injection] = []
    """What the relay asks of engines beside what clients ask."""
    dialect: DialectName = "vllm"
    engine_url: str | None = None
    """Where ``--tokenizer engine`` is. Null: no upstream known."""
    admin_socket: str | None = None
    """Path of the unix socket to push counters and records to. Null: there is no admin process."""
    carry: Progress = msgspec.field(default_factory=Progress)
    """What the recorders before this one have told of the same trace."""


class ExchangeCopy(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A request and its response: a bounded copy with the relay's times (monotonic ns), filled in as they pass."""

    endpoint: Endpoint
    arrival_ns: int
    """Request head complete."""
    end_ns: int = 0
    concurrency: int
    request_headers: dict[str, str]
    """Only those of ``KEPT_REQUEST_HEADERS`` and ``--keep-header``, names in lower case."""
    request_body: list[bytes] | None = []
    """De-chunked reads of the body. Null: larger than the bound."""
    http_status: int | None = None
    response_headers: dict[str, str] = {}
    """Only those of ``KEPT_RESPONSE_HEADERS``."""
    response_reads: list[tuple[int, bytes]] = []
    """Every de-chunked body read with its time, up to the bound."""
    response_whole: bool = True
    """False: the bound cut the reads; what is there is the beginning."""
    last_reads: list[tuple[int, bytes]] = []
    """Where the bound cut: the last reads, which hold the usage."""
    outcome: Status = "ok"
    error_kind: str | None = None
    upstream: str = ""
    """Origin of who served it. Empty: it reached none."""
    sent_ns: int | None = None
    """The request's head was written to the upstream. Null: it never was."""
    injected: list[Injection] = []
    """What the relay added to the request."""


KEPT_REQUEST_HEADERS = frozenset({b"x-request-id", b"x-session-id", b"x-dynamo-session-id", b"content-encoding"})
KEPT_RESPONSE_HEADERS = frozenset({b"content-type", b"content-encoding"})


class EngineChanged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The upstream is another engine than before: records from here on belong to it."""

    engine: Engine | None
    """Null: nothing is known of it."""


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The recorder has its tokenizer and its trace open."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The recorder cannot start; ``reason`` is one line for the user."""

    reason: str


def encode_frame(message: msgspec.Struct) -> bytes:
    """The message with its length (u32, little-endian) before it."""
    return frame(msgspec.msgpack.encode(message))
