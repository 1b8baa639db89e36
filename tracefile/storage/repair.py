"""Repair of a trace whose writer was killed: complete records are kept, the torn end is dropped, the stream is closed.

The file is unchanged up to the end of its last complete frame (gzip: member; plain file: line). The complete lines
after it are rewritten as a new frame: a writer ends a frame every few megabytes.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.appending import lock_writer
from tracefile.storage.compression import (
    GZIP_MAGIC,
    MAGIC_BYTES,
    ZSTD_MAGIC,
    Compression,
    CorruptStreamError,
    TornStreamError,
    compression_of,
    inflated_pieces,
    new_compressor,
)

FILE_STARTS = (b'{"meta"', GZIP_MAGIC, ZSTD_MAGIC)


@dataclass(frozen=True, slots=True)
class RepairedTrace:
    """Result of a repair."""

    meta: Meta | None
    """First header. Null: the header was torn, and the file is now empty."""
    records: int
    torn: bool
    """Bytes after the last complete record were dropped, or a compressed stream had no end."""


def repair(path: str | os.PathLike[str]) -> RepairedTrace:
    """Truncate a trace after its last complete record and close its stream; raises InputError."""
    where = os.fspath(path)
    try:
        with open(where, "r+b") as file:
            lock_writer(file.fileno(), where)
            return _repair_open(file, where)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}; expected a trace to append to") from error


def _repair_open(file: IO[bytes], where: str) -> RepairedTrace:
    size = os.fstat(file.fileno()).st_size
    compression = compression_of(os.pread(file.fileno(), MAGIC_BYTES, 0))
    lines = _Lines(where)
    end = records = 0
    with contextlib.suppress(TornStreamError, CorruptStreamError):
        for content, offset in inflated_pieces(file):
            lines.add(content)
            if lines.damaged:
                break
            if offset is not None and not lines.partial:  # a frame may end within a line
                end, records = offset, records + sum(is_record for _, is_record in lines.tail)
                lines.tail.clear()
    lines.add_last()
    if lines.meta is None:
        _refuse_other_files(lines, where)
        end = 0
        lines.tail.clear()
    if end < size:
        records += _write_tail(file, end, compression, lines.tail)
    os.fsync(file.fileno())
    return RepairedTrace(lines.meta, records, torn=end < size)


def _write_tail(file: IO[bytes], start: int, compression: Compression, tail: list[tuple[bytes, bool]]) -> int:
    """Overwrite the file from ``start`` with lines, as many as fit on the disk; return the number of records."""
    size, lines = os.fstat(file.fileno()).st_size, list(tail)
    before = os.pread(file.fileno(), size - start, start)
    while True:
        compressor = new_compressor(compression)
        content = b"".join(line for line, _ in lines)
        if compressor is not None:
            content = compressor.compress(content) + compressor.finish()
        with contextlib.suppress(OSError):
            if os.pwrite(file.fileno(), content, start) == len(content):
                os.ftruncate(file.fileno(), start + len(content))
                return sum(is_record for _, is_record in lines)
        if not lines:
            return 0
        os.pwrite(file.fileno(), before, start)  # a part may be overwritten
        os.ftruncate(file.fileno(), size)
        del lines[len(lines) * 3 // 4 :]


class _Lines:
    """Parser of a file's lines up to the first line that is neither record nor header."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.meta: Meta | None = None
        """The first header."""
        self.tail: list[tuple[bytes, bool]] = []
        """Lines after the last complete frame, and whether each is a record; at most the content of a frame."""
        self.partial = b""
        """Start of a line whose end is not read yet."""
        self.damaged = False
        """A line is neither record nor header."""
        self._decoder = KvtapeDecoder(Meta())

    def add(self, content: bytes) -> None:
        """Parse the next content of the file, up to a damaged line."""
        *lines, self.partial = (self.partial + content).split(b"\n")
        for line in lines:
            if not self._add_line(line):
                self.damaged = True
                return

    def add_last(self) -> None:
        """Parse a last line without line end."""
        if not self.damaged and self.partial:
            self._add_line(self.partial)

    def _add_line(self, line: bytes) -> bool:
        is_record = False
        if self.meta is None and line.strip():
            if not is_object(line):
                return False
            self.meta = decode_meta(parse_object(line, self.where).get("meta"), self.where)
        elif line.strip() and not is_header(line):
            try:
                self._decoder.decode_without_faults(line, self.where)
            except InputError:
                return False
            is_record = True
        self.tail.append((line + b"\n", is_record))
        return True


def _refuse_other_files(lines: _Lines, where: str) -> None:
    """Raise InputError unless the file is a trace that is truncated within its header."""
    start = lines.partial.strip(b"\0")
    if lines.damaged or not any(start[: len(magic)] == magic[: len(start)] for magic in FILE_STARTS):
        raise InputError(f"{where}: not a trace; expected a trace to append to")
