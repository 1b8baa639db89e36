"""Decoding of captured bodies with a Content-Encoding, with a limit on the decoded bytes."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import zstandard

STEP_BYTES = 1 << 10
"""Input per step of a decoder without an output limit: decodes to at most 1 MB (gzip) or 32 MB (zstandard)."""
MAX_WINDOW_BYTES = 8 << 20
"""Largest window of a zstandard frame over HTTP (RFC 9659)."""
MAX_MEMBERS = 100_000
"""Limit of gzip members or zstandard frames of a body; some servers end one per flush."""
DECODERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gzip", "x-gzip"), lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)),
    "deflate": zlib.decompressobj,
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj(),
}


class UndecodableError(Exception):
    """The body cannot be decoded: unknown or multiple codings, invalid bytes, or too many bytes."""


def decode_reads(reads: Sequence[tuple[int, bytes]], coding: str | None, max_bytes: int) -> Sequence[tuple[int, bytes]]:
    """Return the decoded bytes of each read with the arrival time of the read; raises UndecodableError.

    An encoder may hold bytes back until a later read: a token's arrival time is when a client could decode the token.
    """
    names = [name for word in (coding or "").lower().split(",") if (name := word.strip()) not in ("", "identity")]
    if not names:
        return reads
    if len(names) > 1 or names[0] not in DECODERS:
        raise UndecodableError("unknown content-encoding")
    decoder = _Decoder(DECODERS[names[0]], max_bytes)
    return [(at_ns, plain) for at_ns, data in reads if (plain := decoder.decode(data))]


class _Decoder:
    """Decoder of consecutive gzip members or zstandard frames: a server may flush by ending a member.

    Trailing bytes that do not start a member are ignored, as by clients.
    """

    def __init__(self, begin: Callable[[], Any], max_bytes: int) -> None:
        self._begin, self._bytes_left = begin, max_bytes
        self._member = begin()
        self._members, self._ended = 1, False

    def decode(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        for at in range(0, len(data), STEP_BYTES):
            pieces.append(self._step(data[at : at + STEP_BYTES]))
            self._bytes_left -= len(pieces[-1])
            if self._bytes_left < 0 or self._members > MAX_MEMBERS:
                raise UndecodableError("decoded body too large")
        return b"".join(pieces)

    def _step(self, data: bytes) -> bytes:
        plain = b""
        while data and not self._ended:
            if self._member.eof:
                self._member = self._begin()
                self._members += 1
            try:
                plain += self._member.decompress(data)
            except (zlib.error, zstandard.ZstdError) as broken:
                if self._members == 1:
                    raise UndecodableError("broken content-encoding") from broken
                self._ended = True
            data = self._member.unused_data if self._member.eof else b""
        return plain
