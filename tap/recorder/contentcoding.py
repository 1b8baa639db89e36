"""Content codings taken off copies of bodies, within a bound on the decoded bytes."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import zstandard

STEP_BYTES = 1 << 10
"""Input of one step to a decoder whose output has no bound of its own: at most 1 MB (gzip) or 32 MB (zstandard)."""
MAX_WINDOW_BYTES = 8 << 20
"""The most that RFC 9659 allows a zstandard frame over HTTP."""
MAX_MEMBERS = 100_000
"""Members or frames of a body; a server that flushes by ending one does so once a read."""
DECODERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gzip", "x-gzip"), lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)),
    "deflate": zlib.decompressobj,
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj(),
}


class UndecodableError(Exception):
    """The body cannot be decoded: an unknown coding, several of them, broken bytes, or too many of them."""


def decode_reads(reads: Sequence[tuple[int, bytes]], coding: str | None, max_bytes: int) -> Sequence[tuple[int, bytes]]:
    """Return the decoded bytes of each read at that read's time; raises UndecodableError.

    A coder may hold bytes back until a later read: a token's time is then when a client could have decoded it.
    """
    names = [name for part in (coding or "").lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if not names:
        return reads
    if len(names) > 1 or names[0] not in DECODERS:
        raise UndecodableError("unknown content-encoding")
    decoder = _Decoder(DECODERS[names[0]], max_bytes)
    return [(at_ns, plain) for at_ns, data in reads if (plain := decoder.decode(data))]


class _Decoder:
    """Decodes gzip members or zstandard frames, one after another: a server may flush by ending one.

    Bytes behind the last member that begin no other are left out, as clients do.
    """

    def __init__(self, begin: Callable[[], Any], room: int) -> None:
        self._begin, self._room = begin, room
        self._member = begin()
        self._members, self._ended = 1, False

    def decode(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        for at in range(0, len(data), STEP_BYTES):
            pieces.append(self._step(data[at : at + STEP_BYTES]))
            self._room -= len(pieces[-1])
            if self._room < 0 or self._members > MAX_MEMBERS:
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
