"""Content codings taken off copies of bodies, within a bound on the decoded bytes."""

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zstandard

STEP_BYTES = 1 << 10
"""Input of one step to a decoder whose output has no bound of its own: at most 1 MB (gzip) or 32 MB (zstandard)."""
MAX_WINDOW_BYTES = 8 << 20
"""The most that RFC 9659 allows a zstandard frame over HTTP."""
MAX_CODINGS = 4
MAX_MEMBERS = 100_000
"""Members or frames of a body; a server that flushes by ending one does so once a read."""

Decoder = Callable[[bytes, int], bytes]
"""Decodes the next bytes; keeps back an incomplete part. Raises UndecodableError if they are broken, or decode
to much more than the given number of bytes."""


TOO_LARGE = "decoded body too large"
BROKEN = "broken content-encoding"


class UndecodableError(Exception):
    """The body cannot be decoded: an unknown coding, broken bytes, or too many of them."""


def decode_reads(reads: Sequence[tuple[int, bytes]], coding: str | None, max_bytes: int) -> Sequence[tuple[int, bytes]]:
    """Return the decoded bytes of each read at that read's time; raises UndecodableError.

    A coder may hold bytes back until a later read: a token's time is then when a client could have decoded it.
    """
    if coding is None:
        return reads
    names = [name for part in coding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if len(names) > MAX_CODINGS:
        raise UndecodableError("too many content-encodings")
    for name in reversed(names):  # the last one named was put on last
        reads = _decoded(reads, _decoder(name), max_bytes)
    return reads


def _decoded(reads: Iterable[tuple[int, bytes]], decode: Decoder, room: int) -> list[tuple[int, bytes]]:
    decoded = []
    for at_ns, data in reads:
        plain = decode(data, room)
        room -= len(plain)
        if room < 0:
            raise UndecodableError(TOO_LARGE)
        if plain:
            decoded.append((at_ns, plain))
    return decoded


def _decoder(name: str) -> Decoder:
    if name in ("gzip", "x-gzip"):
        return _member_decoder(lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error)
    if name == "deflate":
        return _member_decoder(zlib.decompressobj, zlib.error)
    if name == "zstd":
        context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        return _member_decoder(context.decompressobj, zstandard.ZstdError)
    if name == "br" and importlib.util.find_spec("brotli") is not None:
        return _brotli_decoder(importlib.import_module("brotli"))
    raise UndecodableError("unknown content-encoding")


def _member_decoder(begin: Callable[[], Any], error: type[Exception]) -> Decoder:
    """Decode gzip members or zstandard frames, one after another: a server may flush by ending one.

    Bytes behind the last member that begin no other are left out, as clients do.
    """
    member, members, ended = begin(), 1, False

    def step(data: bytes) -> bytes:
        nonlocal member, members, ended
        plain = b""
        while data and not ended:
            if member.eof:
                member = begin()
                members += 1
            try:
                plain += member.decompress(data)
            except error as broken:
                if members == 1:
                    raise UndecodableError(BROKEN) from broken
                ended = True
            data = member.unused_data if member.eof else b""
        return plain

    def decode(data: bytes, room: int) -> bytes:
        pieces: list[bytes] = []
        for at in range(0, len(data), STEP_BYTES):
            pieces.append(step(data[at : at + STEP_BYTES]))
            room -= len(pieces[-1])
            if room < 0 or members > MAX_MEMBERS:
                raise UndecodableError(TOO_LARGE)
        return b"".join(pieces)

    return decode


def _brotli_decoder(brotli: Any) -> Decoder:
    decompressor = brotli.Decompressor()

    def decode(data: bytes, room: int) -> bytes:
        try:
            plain: bytes = decompressor.process(data, output_buffer_limit=room + 1)
        except brotli.error as error:
            raise UndecodableError(BROKEN) from error
        if not decompressor.can_accept_more_data():
            raise UndecodableError(TOO_LARGE)
        return plain

    return decode
