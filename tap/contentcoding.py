"""Undo ``Content-Encoding`` on the recorder's copies; the relay forwards encoded bytes as they are."""

import zlib
from collections.abc import Sequence

from wire.stream import BodyRead

MAX_DECODED_BYTES = 256 << 20
"""Past this a small body is a bomb, and its request is recorded without what it said."""
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class UndecodableError(Exception):
    """The body cannot be decoded: an unknown coding, broken bytes, or too many of them."""


def decode_reads(reads: Sequence[tuple[int, bytes]], coding: str) -> list[BodyRead]:
    """The decoded bytes of each read at that read's time; raises UndecodableError.

    A coder may hold bytes back until a later read: a token's time is then when a client could have decoded it.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return [BodyRead(at_ns, data) for at_ns, data in reads]
    if name not in _WINDOW_BITS:
        raise UndecodableError("unknown content-encoding")
    decoder = zlib.decompressobj(_WINDOW_BITS[name])
    decoded = []
    room = MAX_DECODED_BYTES
    for at_ns, data in reads:
        try:
            plain = decoder.decompress(data, room)
        except zlib.error as error:
            raise UndecodableError("broken content-encoding") from error
        room -= len(plain)
        if room <= 0 or decoder.unconsumed_tail:
            raise UndecodableError("decoded body too large")
        if plain:
            decoded.append(BodyRead(at_ns, plain))
    return decoded
