"""Undo ``Content-Encoding`` on the recorder's copies; the relay forwards encoded bytes as they are."""

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zstandard

MAX_DECODED_BYTES = 256 << 20
"""Bound against decompression bombs: beyond it the request is recorded without its content."""
STEP_BYTES = 1 << 10
"""Input of one step to zstandard, whose output has no bound of its own: at most 32 MB a step."""

Decoder = Callable[[bytes, int], bytes]
"""Decodes the next bytes; keeps back an incomplete part. Raises UndecodableError if they are broken, or decode
to much more than the given number of bytes."""


TOO_LARGE = "decoded body too large"
BROKEN = "broken content-encoding"


class UndecodableError(Exception):
    """The body cannot be decoded: an unknown coding, broken bytes, or too many of them."""


def decode_reads(reads: Sequence[tuple[int, bytes]], coding: str | None) -> Sequence[tuple[int, bytes]]:
    """The decoded bytes of each read at that read's time; raises UndecodableError.

    A coder may hold bytes back until a later read: a token's time is then when a client could have decoded it.
    """
    if coding is None:
        return reads
    names = [name for part in coding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    for name in reversed(names):  # the last one named was put on last
        reads = _decoded(reads, _decoder(name))
    return reads


def _decoded(reads: Iterable[tuple[int, bytes]], decode: Decoder) -> list[tuple[int, bytes]]:
    decoded = []
    room = MAX_DECODED_BYTES
    for at_ns, data in reads:
        plain = decode(data, room)
        room -= len(plain)
        if room <= 0:
            raise UndecodableError(TOO_LARGE)
        if plain:
            decoded.append((at_ns, plain))
    return decoded


def _decoder(name: str) -> Decoder:
    if name in ("gzip", "x-gzip"):
        return _inflater(16 + zlib.MAX_WBITS)
    if name == "deflate":
        return _inflater(zlib.MAX_WBITS)
    if name == "zstd":
        return _zstandard_decoder()
    if name == "br" and importlib.util.find_spec("brotli") is not None:
        return _brotli_decoder(importlib.import_module("brotli"))
    raise UndecodableError("unknown content-encoding")


def _inflater(window_bits: int) -> Decoder:
    inflater = zlib.decompressobj(window_bits)

    def decode(data: bytes, room: int) -> bytes:
        try:
            plain = inflater.decompress(data, room)
        except zlib.error as error:
            raise UndecodableError(BROKEN) from error
        if inflater.unconsumed_tail:
            raise UndecodableError(TOO_LARGE)
        return plain

    return decode


def _zstandard_decoder() -> Decoder:
    """Frame after frame: a server may flush by ending one."""
    context = zstandard.ZstdDecompressor()
    frame = context.decompressobj()

    def step(data: bytes) -> bytes:
        nonlocal frame
        plain = b""
        while data:
            if frame.eof:
                frame = context.decompressobj()
            try:
                plain += frame.decompress(data)
            except zstandard.ZstdError as error:
                raise UndecodableError(BROKEN) from error
            data = frame.unused_data if frame.eof else b""
        return plain

    def decode(data: bytes, room: int) -> bytes:
        pieces: list[bytes] = []
        for at in range(0, len(data), STEP_BYTES):
            pieces.append(step(data[at : at + STEP_BYTES]))
            room -= len(pieces[-1])
            if room <= 0:
                raise UndecodableError(TOO_LARGE)
        return b"".join(pieces)

    return decode


def _brotli_decoder(brotli: Any) -> Decoder:
    decompressor = brotli.Decompressor()

    def decode(data: bytes, room: int) -> bytes:
        try:
            plain: bytes = decompressor.process(data, output_buffer_limit=room)
        except brotli.error as error:
            raise UndecodableError(BROKEN) from error
        if not decompressor.can_accept_more_data():
            raise UndecodableError(TOO_LARGE)
        return plain

    return decode
