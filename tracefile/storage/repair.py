"""Mending a trace whose writer was killed: its complete records are kept, the torn end goes, and the file has an end.

The file stays as it is up to the end of its last complete frame (member, of gzip; line, of a plain file). The complete
lines behind it are written again, in their place, as a frame of their own: a writer ends frames every few megabytes.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.appending import claim
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

BEGINNINGS = (b'{"meta"', GZIP_MAGIC, ZSTD_MAGIC)


@dataclass(frozen=True, slots=True)
class RepairedTrace:
    """Contents of a repaired file."""

    meta: Meta | None
    """Its first header. Null: not even that was whole, and the file is empty now."""
    records: int
    torn: bool
    """Something after the last complete record was dropped, or a compressed stream had no end."""


def repair(path: str | os.PathLike[str]) -> RepairedTrace:
    """Cut the file after its last complete record and close its stream; raises InputError if no trace or in use."""
    where = os.fspath(path)
    try:
        with open(where, "r+b") as file:
            claim(file.fileno(), where)
            return _mend_open(file, where)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}; expected a trace to go on with") from error


def _mend_open(file: IO[bytes], where: str) -> RepairedTrace:
    size = os.fstat(file.fileno()).st_size
    compression = compression_of(os.pread(file.fileno(), MAGIC_BYTES, 0))
    lines = _Lines(where)
    end = records = 0
    with contextlib.suppress(TornStreamError, CorruptStreamError):
        for content, offset in inflated_pieces(file):
            lines.take(content)
            if lines.damaged:
                break
            if offset is not None and not lines.held:  # a frame may end within a line
                end, records = offset, records + sum(is_record for _, is_record in lines.tail)
                lines.tail.clear()
    lines.take_last()
    if lines.meta is None:
        _refuse_other_files(lines, where)
        end = 0
        lines.tail.clear()
    if end < size:
        records += _write_tail(file, end, compression, lines.tail)
    os.fsync(file.fileno())
    return RepairedTrace(lines.meta, records, torn=end < size)


def _write_tail(file: IO[bytes], start: int, compression: Compression, tail: list[tuple[bytes, bool]]) -> int:
    """Write lines behind ``start`` in place of what is there, as many as there is room for; return their records."""
    size, kept = os.fstat(file.fileno()).st_size, list(tail)
    before = os.pread(file.fileno(), size - start, start)
    while True:
        compressor = new_compressor(compression)
        content = b"".join(line for line, _ in kept)
        if compressor is not None:
            content = compressor.compress(content) + compressor.finish()
        with contextlib.suppress(OSError):
            if os.pwrite(file.fileno(), content, start) == len(content):
                os.ftruncate(file.fileno(), start + len(content))
                return sum(is_record for _, is_record in kept)
        if not kept:
            return 0
        os.pwrite(file.fileno(), before, start)  # a part may have been written over
        os.ftruncate(file.fileno(), size)
        del kept[len(kept) * 3 // 4 :]


class _Lines:
    """A file's lines for as long as they are complete records and headers."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.meta: Meta | None = None
        """The first header."""
        self.tail: list[tuple[bytes, bool]] = []
        """Lines behind the last complete frame, and whether each is a record: a frame's content at most."""
        self.held = b""
        """Line without its end so far."""
        self.damaged = False
        """A line was neither record nor header."""
        self._decoder = KvtapeDecoder(Meta())

    def take(self, content: bytes) -> None:
        """Take what comes next in the file, up to a line that is damaged."""
        *lines, self.held = (self.held + content).split(b"\n")
        for line in lines:
            if not self._take_line(line):
                self.damaged = True
                return

    def take_last(self) -> None:
        """Take a last line that lacks only its end."""
        if not self.damaged and self.held:
            self._take_line(self.held)

    def _take_line(self, line: bytes) -> bool:
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
    """Raise InputError unless the file is what is left of a trace that was cut within its header."""
    begun = lines.held.strip(b"\0")
    if lines.damaged or not any(begun[: len(begins)] == begins[: len(begun)] for begins in BEGINNINGS):
        raise InputError(f"{where}: not a trace; expected one to go on with")
