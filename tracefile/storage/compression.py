"""Compression of trace files: selected by suffix when writing, by magic bytes when reading; may be truncated."""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Final, Literal, Protocol

import zstandard

Compression = Literal["plain", "gzip", "zstd"]

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAGIC_BYTES = 4
COMPRESSION_OF_SUFFIX: Final[Mapping[str, Compression]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

WINDOW_LOG = 27
"""128 MiB, the largest window that every zstd decoder accepts: chains repeated within it cost a few bytes."""

FRAME_BYTES = 1 << 25
"""Content after which a sync ends the frame: the open frame of a killed writer is small enough to rewrite."""

PLAIN_READ_BYTES = 1 << 20
INFLATED_BYTES = 1 << 20
"""Target size of an inflated read: repeated chains compress a thousandfold, so reads shrink."""
MIN_READ_BYTES, MAX_READ_BYTES = 1 << 4, 1 << 12


class _CompressingStream(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self, mode: int = ..., /) -> bytes: ...


class Compressor:
    """Compresses to frames (gzip: members); a reader gets all data compressed before a ``sync``."""

    def __init__(self, new_stream: Callable[[], _CompressingStream], sync_mode: int) -> None:
        self._new_stream, self._sync_mode = new_stream, sync_mode
        self._stream: _CompressingStream | None = None
        """Null: no frame is open."""
        self._frame_bytes = 0
        """Content of the open frame."""

    def compress(self, data: bytes) -> bytes:
        """Compress ``data``; the output may lag until ``sync``."""
        if not data:
            return b""
        if self._stream is None:
            self._stream, self._frame_bytes = self._new_stream(), 0
        self._frame_bytes += len(data)
        return self._stream.compress(data)

    def sync(self) -> bytes:
        """Return all pending output. A small frame stays open: the next lines repeat its hashes."""
        if self._stream is None:
            return b""
        return self.finish() if self._frame_bytes >= FRAME_BYTES else self._stream.flush(self._sync_mode)

    def finish(self) -> bytes:
        """Return the end of the frame, with its checksum."""
        stream, self._stream = self._stream, None
        return b"" if stream is None else stream.flush()


def compressor_for(path: str | os.PathLike[str]) -> Compressor | None:
    """Return the compressor for a path's suffix ``.gz`` or ``.zst``; None: plain."""
    return new_compressor(COMPRESSION_OF_SUFFIX.get(os.path.splitext(os.fspath(path))[1], "plain"))


def new_compressor(compression: Compression) -> Compressor | None:
    """Return a compressor; None: plain."""
    if compression == "gzip":
        return Compressor(lambda: zlib.compressobj(6, wbits=31), zlib.Z_SYNC_FLUSH)
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(compression_params=_zstd_parameters())
        return Compressor(compressor.compressobj, zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return None


def _zstd_parameters() -> zstandard.ZstdCompressionParameters:
    """Return the fast level with sparse long-distance matching: repeated hash chains have over a kilobyte."""
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
    """The compressed stream is truncated: its writer was killed, or is still writing."""


class CorruptStreamError(Exception):
    """The compressed stream cannot be decoded past this point."""


def compression_of(head: bytes) -> Compression:
    """Detect the compression of a file from its first bytes."""
    if head.startswith(GZIP_MAGIC):
        return "gzip"
    if head.startswith(ZSTD_MAGIC):
        return "zstd"
    return "plain"


def inflated_pieces(file: IO[bytes]) -> Iterator[tuple[bytes, int | None]]:
    """Yield pieces of content; each has the file offset if a frame (plain file: a line) ends with it, else None.

    All readable content is yielded before TornStreamError (the last frame has no end) or CorruptStreamError.
    """
    data = file.read(MAGIC_BYTES)
    compression, offset, size = compression_of(data), len(data), MIN_READ_BYTES
    if compression == "plain":
        while data:
            lines, end, partial = data.rpartition(b"\n")
            yield lines + end, offset - len(partial)
            if partial:
                yield partial, None
            data = file.read(PLAIN_READ_BYTES)
            offset += len(data)
        return
    stream, frame_start = None, 0
    while data:
        stream = stream or new_inflater(compression)
        try:
            chunk = stream.decompress(data)
        except (zlib.error, zstandard.ZstdError) as error:
            yield _before_damage(file, compression, frame_start, offset - len(data)), None
            raise CorruptStreamError(f"damaged {compression} data ({error})") from None
        data = stream.unused_data
        if stream.eof:
            stream, frame_start = None, offset - len(data)
        yield chunk, None if stream else frame_start
        if not data:
            size = _next_read_bytes(size, len(chunk))
            data = file.read(size)
            offset += len(data)
    if stream is not None:
        raise TornStreamError(f"the {compression} stream is truncated")


def _before_damage(file: IO[bytes], compression: Compression, frame_start: int, start: int) -> bytes:
    """Return the content from ``start`` up to the damage; empty for a pipe."""
    stream, content = new_inflater(compression), bytearray()
    with contextlib.suppress(OSError, zlib.error, zstandard.ZstdError):
        file.seek(frame_start)
        stream.decompress(file.read(start - frame_start))
        while byte := file.read(1):
            content += stream.decompress(byte)
    return bytes(content)


def _next_read_bytes(size: int, inflated: int) -> int:
    fitting = size * INFLATED_BYTES // max(inflated, 1)
    return max(MIN_READ_BYTES, min(fitting, 2 * size, MAX_READ_BYTES))


class Inflater(Protocol):
    """Decompressor of one frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def new_inflater(compression: Compression) -> Inflater:
    """Return a decompressor for a gzip or zstd frame."""
    if compression == "gzip":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
