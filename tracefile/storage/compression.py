"""Compressed streams that may be cut short; written by the suffix of the file, read by its first bytes."""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal, Protocol

import zstandard

Compression = Literal["plain", "gzip", "zstd"]

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAGIC_BYTES = 4

WINDOW_LOG = 27
"""128 MiB, the longest window that every zstd decoder accepts: hashes that come back within it cost a few bytes."""

PLAIN_READ_BYTES = 1 << 20
INFLATED_BYTES = 1 << 20
"""About what one read may inflate to: chains that repeat shrink a thousandfold, so fewer bytes are read then."""
MIN_READ_BYTES, MAX_READ_BYTES = 1 << 4, 1 << 12


class _StreamCompressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self, mode: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressing stream that can be flushed so that a reader gets everything written so far."""

    stream: _StreamCompressor
    sync_mode: int
    finish_mode: int

    def compress(self, data: bytes) -> bytes:
        """Take ``data`` in; what comes out may lag behind until ``sync``."""
        return self.stream.compress(data)

    def sync(self) -> bytes:
        """Everything still held back, the stream left open (and its window kept)."""
        return self.stream.flush(self.sync_mode)

    def finish(self) -> bytes:
        """The stream's end, with its checksum."""
        return self.stream.flush(self.finish_mode)


def compressor_for(path: str | os.PathLike[str]) -> Compressor | None:
    """The compressor a path's suffix asks for: ``.gz``, ``.zst``; None: plain."""
    suffix = os.path.splitext(os.fspath(path))[1]
    return new_compressor({".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}.get(suffix, "plain"))


def compressor_like(head: bytes) -> Compressor | None:
    """The compressor that goes on with a file of these first bytes; None: plain."""
    return new_compressor(compression_of(head))


def new_compressor(compression: str) -> Compressor | None:
    """A stream of its own in this format; None: plain."""
    if compression == "gzip":
        return Compressor(zlib.compressobj(6, wbits=31), zlib.Z_SYNC_FLUSH, zlib.Z_FINISH)
    if compression == "zstd":
        stream = zstandard.ZstdCompressor(compression_params=_zstd_parameters()).compressobj()
        return Compressor(stream, zstandard.COMPRESSOBJ_FLUSH_BLOCK, zstandard.COMPRESSOBJ_FLUSH_FINISH)
    return None


def _zstd_parameters() -> zstandard.ZstdCompressionParameters:
    """Return the fast level with a sparse long search: only chains of a kilobyte and more repeat in a trace."""
    return zstandard.ZstdCompressionParameters.from_level(
        1,
        window_log=WINDOW_LOG,
        enable_ldm=True,
        ldm_min_match=128,
        ldm_hash_rate_log=9,
        ldm_hash_log=18,
        write_checksum=True,
    )


class TornStreamError(Exception):
    """The compressed stream stops before its end: its writer was killed, or is still writing."""


class CorruptStreamError(Exception):
    """The compressed stream cannot be decoded past this point."""


def compression_of(head: bytes) -> Compression:
    """Return a file's compression by its first bytes."""
    if head.startswith(GZIP_MAGIC):
        return "gzip"
    if head.startswith(ZSTD_MAGIC):
        return "zstd"
    return "plain"


def inflated_chunks(file: IO[bytes], *, growing: bool = False) -> Iterator[bytes]:
    """Yield the content of all members; raises TornStreamError where it is cut, CorruptStreamError if damaged.

    ``growing``: another process writes the file; b"" stands for its present end, and reading goes on from there.
    """
    data = file.read(MAGIC_BYTES)
    while growing and len(data) < MAGIC_BYTES:
        yield b""
        data += file.read(MAGIC_BYTES - len(data))
    compression = compression_of(data)
    if compression == "plain":
        while data or growing:
            yield data
            data = file.read(PLAIN_READ_BYTES)
        return
    size = MIN_READ_BYTES
    stream = _new_inflater(compression)
    open_stream = True
    while data:
        if not open_stream:
            stream, open_stream = _new_inflater(compression), True
        try:
            chunk = stream.decompress(data)
        except (zlib.error, zstandard.ZstdError) as error:
            raise CorruptStreamError(f"damaged {compression} data ({error})") from None
        if chunk:
            yield chunk
        data = b""
        if stream.eof:
            open_stream = False
            data = stream.unused_data
        size = _next_read_bytes(size, len(chunk))
        data = data or file.read(size)
        while growing and not data:
            yield b""
            data = file.read(size)
    if open_stream:
        raise TornStreamError(f"the {compression} stream is cut short")


def _next_read_bytes(size: int, inflated: int) -> int:
    fitting = size * INFLATED_BYTES // max(inflated, 1)
    return max(MIN_READ_BYTES, min(fitting, 2 * size, MAX_READ_BYTES))


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _new_inflater(compression: Compression) -> _Inflater:
    if compression == "gzip":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
