"""Compressed streams that may be cut short; written by the suffix of the file, read by its first bytes."""

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
"""128 MiB, the longest window that every zstd decoder accepts: hashes that come back within it cost a few bytes."""

FRAME_BYTES = 1 << 25
"""Content after which a sync ends the frame: what a kill leaves open is small enough to be written again."""

PLAIN_READ_BYTES = 1 << 20
INFLATED_BYTES = 1 << 20
"""About what one read may inflate to: chains that repeat shrink a thousandfold, so fewer bytes are read then."""
MIN_READ_BYTES, MAX_READ_BYTES = 1 << 4, 1 << 12


class _CompressingStream(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self, mode: int = ..., /) -> bytes: ...


class Compressor:
    """Compresses to frames (members, of gzip); a reader gets all that was taken before a ``sync``."""

    def __init__(self, new_stream: Callable[[], _CompressingStream], sync_mode: int) -> None:
        self._new_stream, self._sync_mode = new_stream, sync_mode
        self._stream: _CompressingStream | None = None
        """Null: no frame is open."""
        self._frame_bytes = 0
        """Content of the open frame."""

    def compress(self, data: bytes) -> bytes:
        """Take ``data`` in; what comes out may lag behind until ``sync``."""
        if not data:
            return b""
        if self._stream is None:
            self._stream, self._frame_bytes = self._new_stream(), 0
        self._frame_bytes += len(data)
        return self._stream.compress(data)

    def sync(self) -> bytes:
        """Everything still held back. A small frame is left open, since the next lines repeat hashes of its own."""
        if self._stream is None:
            return b""
        return self.finish() if self._frame_bytes >= FRAME_BYTES else self._stream.flush(self._sync_mode)

    def finish(self) -> bytes:
        """The frame's end, with its checksum."""
        stream, self._stream = self._stream, None
        return b"" if stream is None else stream.flush()


def compressor_for(path: str | os.PathLike[str]) -> Compressor | None:
    """The compressor a path's suffix asks for: ``.gz``, ``.zst``; None: plain."""
    return new_compressor(COMPRESSION_OF_SUFFIX.get(os.path.splitext(os.fspath(path))[1], "plain"))


def compressor_like(head: bytes) -> Compressor | None:
    """The compressor that goes on with a file of these first bytes; None: plain."""
    return new_compressor(compression_of(head))


def new_compressor(compression: Compression) -> Compressor | None:
    """A compressor to this format; None: plain."""
    if compression == "gzip":
        return Compressor(lambda: zlib.compressobj(6, wbits=31), zlib.Z_SYNC_FLUSH)
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(compression_params=_zstd_parameters())
        return Compressor(compressor.compressobj, zstandard.COMPRESSOBJ_FLUSH_BLOCK)
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
    stream = new_inflater(compression)
    open_stream = True
    while data:
        if not open_stream:
            stream, open_stream = new_inflater(compression), True
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


class Inflater(Protocol):
    """Decompressor of one frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def new_inflater(compression: Compression) -> Inflater:
    """Return a decompressor of a frame of gzip or zstd."""
    if compression == "gzip":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
