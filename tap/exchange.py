"""What crosses between the relay and the recorder process: messages as length-prefixed msgpack over a socket pair."""

import select
import socket
import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from tracefile.schema import HashAlgorithm, Meta, Status

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20


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


class ExchangeCopy(msgspec.Struct, array_like=True, frozen=True, tag=True, kw_only=True):
    """One finished request and its response: a bounded copy with the relay's times (monotonic ns)."""

    endpoint: Endpoint
    arrival_ns: int
    """Request head complete."""
    end_ns: int
    concurrency: int
    request_headers: dict[str, str]
    """Only those of ``KEPT_REQUEST_HEADERS``, names in lower case."""
    request_body: list[bytes] | None
    """De-chunked reads of the body. Null: larger than the bound."""
    http_status: int | None
    response_headers: dict[str, str]
    """Only those of ``KEPT_RESPONSE_HEADERS``."""
    response_reads: list[tuple[int, bytes]]
    """Every de-chunked body read with its time, up to the bound."""
    response_whole: bool
    """False: the bound cut the reads; what is there is the beginning."""
    last_reads: list[tuple[int, bytes]]
    """Where the bound cut: the last reads, which hold the usage."""
    outcome: Status
    error_kind: str | None


KEPT_REQUEST_HEADERS = frozenset({b"x-request-id", b"x-session-id", b"x-dynamo-session-id", b"content-encoding"})
KEPT_RESPONSE_HEADERS = frozenset({b"content-type", b"content-encoding"})


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The recorder has its tokenizer and its trace open."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The recorder cannot start; ``reason`` is one line for the user."""

    reason: str


class Progress(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A recorder's counts since it started, sent after a flush: what it counts as recorded is in the file."""

    received: int = 0
    """Exchanges taken off the socket: each is recorded or dropped below."""
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


def encode_frame(message: msgspec.Struct) -> bytes:
    """The message with its length (u32, little-endian) before it."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def split_frames(buffer: bytearray) -> list[bytes]:
    """Take every complete frame's payload out of ``buffer``; an incomplete one stays."""
    payloads = []
    offset = 0
    while len(buffer) - offset >= _LENGTH.size:
        end = offset + _LENGTH.size + _LENGTH.unpack_from(buffer, offset)[0]
        if len(buffer) < end:
            break
        payloads.append(bytes(memoryview(buffer)[offset + _LENGTH.size : end]))
        offset = end
    del buffer[:offset]
    return payloads


def receive_frames(sock: socket.socket, idle_s: float) -> Iterator[bytes | None]:
    """Each frame's payload as it comes, None whenever nothing came for ``idle_s``; ends when the other side does."""
    buffer = bytearray()
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    while True:
        if not readable.poll(idle_s * 1e3):
            yield None
            continue
        try:
            data = sock.recv(_READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        buffer += data
        yield from split_frames(buffer)
