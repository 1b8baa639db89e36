"""Mending a trace whose writer was killed: its complete records are kept, the torn end goes, and the file has an end.

The file stays as it is up to the end of its last complete frame (member, of gzip; line, of a plain file). The complete
lines behind it are written again, in their place, as a frame of their own: a writer ends frames every few megabytes.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import zstandard

from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.appending import claim
from tracefile.storage.compression import (
    GZIP_MAGIC,
    MAGIC_BYTES,
    MAX_READ_BYTES,
    PLAIN_READ_BYTES,
    ZSTD_MAGIC,
    Compression,
    Inflater,
    compression_of,
    new_compressor,
    new_inflater,
)

BEGINNINGS = (b'{"meta"', GZIP_MAGIC, ZSTD_MAGIC)


@dataclass(frozen=True, slots=True)
class Mended:
    """Contents of a mended file."""

    meta: Meta | None
    """Its first header. Null: not even that was whole, and the file is empty now."""
    records: int
    torn: bool
    """Something after the last complete record was dropped, or a compressed stream had no end."""


def mend(path: str | os.PathLike[str]) -> Mended:
    """Cut the file after its last complete record and close its stream; raises InputError if no trace or in use."""
    where = os.fspath(path)
    try:
        with open(where, "r+b") as file:
            claim(file.fileno(), where)
            return _mend_open(file, where)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}; expected a trace to go on with") from error


def _mend_open(file: IO[bytes], where: str) -> Mended:
    size = os.fstat(file.fileno()).st_size
    compression = compression_of(os.pread(file.fileno(), MAGIC_BYTES, 0))
    lines = _LineCount(where)
    end = complete_records = 0
    for content, offset in _pieces(file, compression):
        lines.take(content)
        if lines.damaged:
            break
        if offset is not None and not lines.held:  # a frame may end within a line
            end, complete_records = offset, lines.records
    lines.end()
    if lines.meta is None:
        _refuse_other_files(lines, where)
        end = 0
    torn = end < size
    if torn:
        complete_records += _write_tail(file, end, compression, lines)
    os.fsync(file.fileno())
    return Mended(lines.meta, complete_records, torn)


def _write_tail(file: IO[bytes], start: int, compression: Compression, lines: "_LineCount") -> int:
    """Write the complete lines behind ``start`` in place of what is there, as many as there is room for.

    ``lines``: those of the whole file. Returns the records written.
    """
    limit = 0 if lines.meta is None else lines.number
    size = os.fstat(file.fileno()).st_size
    before = os.pread(file.fileno(), size - start, start)
    while True:
        tail = _LineCount(lines.where, lines.meta, limit)
        content = _tail(file, start, compression, tail) if limit else b""
        with contextlib.suppress(OSError):
            if os.pwrite(file.fileno(), content, start) == len(content):
                os.ftruncate(file.fileno(), start + len(content))
                return tail.records
        if not limit:
            return 0
        os.pwrite(file.fileno(), before, start)  # a part may have been written over
        os.ftruncate(file.fileno(), size)
        limit = min(limit, tail.number) * 3 // 4


def _tail(file: IO[bytes], start: int, compression: Compression, lines: "_LineCount") -> bytes:
    """Return the complete lines behind ``start``, compressed as the file is."""
    compressor = new_compressor(compression)
    file.seek(start)
    written = bytearray()
    for content, _ in _pieces(file, compression):
        kept = lines.take(content)
        written += kept if compressor is None else compressor.compress(kept)
        if lines.damaged:
            break
    last = lines.end()
    return bytes(written) + (last if compressor is None else compressor.compress(last) + compressor.finish())


class _LineCount:
    """Counts a file's lines for as long as they are complete records and headers."""

    def __init__(self, where: str, meta: Meta | None = None, limit: int | None = None) -> None:
        """``meta``: the file's first header. None: it comes first. ``limit``: most lines to take."""
        self.where, self.meta, self._limit = where, meta, limit
        self._decoder = KvtapeDecoder(Meta())
        self.number = self.records = 0
        self.held = b""
        """Line without its end so far."""
        self.damaged = False
        """A line was neither record nor header, or beyond the limit."""

    def take(self, content: bytes) -> bytes:
        """Take what comes next in the file; return the lines that it completes, up to one that is damaged."""
        *lines, self.held = (self.held + content).split(b"\n")
        for index, line in enumerate(lines):
            if not self._take_line(line):
                self.damaged = True
                lines = lines[:index]
                break
        return b"".join(line + b"\n" for line in lines)

    def end(self) -> bytes:
        """Take a last line that lacks only its end, and return it with one; empty: there is none."""
        if self.damaged or not self.held or not self._take_line(self.held):
            return b""
        return self.held + b"\n"

    def _take_line(self, line: bytes) -> bool:
        if self.number == self._limit:
            return False
        self.number += 1
        if not line or line.isspace():
            return True
        if self.meta is None:
            if not is_object(line):
                return False
            self.meta = decode_meta(parse_object(line, self.where).get("meta"), self.where)
            return True
        try:
            self._decoder.decode_without_faults(line, self.where)
        except InputError:
            return is_header(line)
        self.records += 1
        return True


def _refuse_other_files(lines: _LineCount, where: str) -> None:
    """Raise InputError unless the file is what is left of a trace that was cut within its header."""
    begun = lines.held.strip(b"\0")
    if lines.damaged or not any(begun[: len(begins)] == begins[: len(begun)] for begins in BEGINNINGS):
        raise InputError(f"{where}: not a trace; expected one to go on with")


def _pieces(file: IO[bytes], compression: Compression) -> Iterator[tuple[bytes, int | None]]:
    """Yield the content from the file's place on, each with the offset at which a frame ends with it; null: none does.

    Damage ends it, behind all that can be read before.
    """
    offset = file.tell()
    if compression == "plain":
        while data := file.read(PLAIN_READ_BYTES):
            lines, end, rest = data.rpartition(b"\n")
            offset += len(data)
            yield lines + end, offset - len(rest)
            yield rest, None
        return
    inflater: Inflater | None = None
    ahead: Inflater | None = None
    while data := file.read(MAX_READ_BYTES):
        offset += len(data)
        while data:
            if inflater is None or ahead is None:
                inflater, ahead = new_inflater(compression), new_inflater(compression)
            try:
                ahead.decompress(data)
            except (zlib.error, zstandard.ZstdError):
                yield _before_damage(inflater, data), None
                return
            content, data = inflater.decompress(data), inflater.unused_data
            yield content, offset - len(data) if inflater.eof else None
            if inflater.eof:
                inflater = ahead = None


def _before_damage(inflater: Inflater, data: bytes) -> bytes:
    """Return what can be read of damaged data, byte by byte."""
    content = bytearray()
    with contextlib.suppress(zlib.error, zstandard.ZstdError):
        for index in range(len(data)):
            content += inflater.decompress(data[index : index + 1])
    return bytes(content)
