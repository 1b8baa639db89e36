"""Mending a trace whose writer was killed: its complete records are kept, the torn end goes, and the file has an end.

It is mended in place and in one write, so that a full disk is no obstacle and a kill meanwhile costs nothing more.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import IO

from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.appending import claim
from tracefile.storage.compression import GZIP_MAGIC, ZSTD_MAGIC, compressor_like
from tracefile.storage.seals import Seal, seals

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
    """Cut the file after its last complete record and close its stream; a whole file is left as it is.

    Raises InputError if the file is no trace of ours, is still being written, or cannot be read and written.
    """
    where = os.fspath(path)
    try:
        with open(where, "r+b") as file:
            claim(file.fileno(), where)
            return _mend_open(file, where)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}; expected a trace to go on with") from error


def _mend_open(file: IO[bytes], where: str) -> Mended:
    size = os.fstat(file.fileno()).st_size
    lines = _LineCount(where)
    offset, closing, rest = 0, b"", b""
    sealed = 0
    for piece in seals(file):
        kept, damaged = lines.take(piece.content)
        if damaged or not isinstance(piece, Seal):
            rest = kept
            break
        offset, closing, sealed = piece.offset, piece.closing, lines.records
    if lines.meta is None:
        _refuse_other_files(file, where)
        offset, closing, rest = 0, b"", b""
    ending = closing + _compressed(file, rest)
    torn = offset < size or bool(ending)
    whole = not torn or _end_file(file, offset, closing, ending)
    os.fsync(file.fileno())
    return Mended(lines.meta, lines.records if whole else sealed, torn)


def _end_file(file: IO[bytes], offset: int, closing: bytes, ending: bytes) -> bool:
    """Write the ending in place of what was torn; false if there is no room for it, and only the stream was closed."""
    for data in (ending, closing, b""):
        with contextlib.suppress(OSError):
            if os.pwrite(file.fileno(), data, offset) == len(data):
                os.ftruncate(file.fileno(), offset + len(data))
                return data is ending
    return False


class _LineCount:
    """Counts a file's lines for as long as they are whole."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._decoder = KvtapeDecoder(Meta())
        self.meta: Meta | None = None
        self.records = 0

    def take(self, content: bytes) -> tuple[bytes, bool]:
        """The leading lines that are records or headers, and whether something else follows them."""
        *lines, last = content.split(b"\n")
        for at, line in enumerate(lines):
            if not self._take_line(line):
                return b"".join(kept + b"\n" for kept in lines[:at]), True
        if not last:
            return content, False
        if self._take_line(last):
            return content + b"\n", False
        return content[: -len(last)], True

    def _take_line(self, line: bytes) -> bool:
        if not line or line.isspace():
            return True
        if self.meta is None:
            if not is_object(line):
                return False
            found = parse_object(line, self._where).get("meta")
            self.meta = decode_meta(found if isinstance(found, dict) else {}, self._where)
            return True
        try:
            self._decoder.decode(line, self._where)
        except InputError:
            return is_header(line)
        self.records += 1
        return True


def _refuse_other_files(file: IO[bytes], where: str) -> None:
    """Raise InputError unless the file is what is left of a trace that was cut within its header."""
    file.seek(0)
    begun = next((piece.content for piece in seals(file)), b"").strip(b"\0")
    if b"\n" in begun or not any(begun[: len(begins)] == begins[: len(begun)] for begins in BEGINNINGS):
        raise InputError(f"{where}: not a trace; expected one to go on with")


def _compressed(file: IO[bytes], lines: bytes) -> bytes:
    """The lines as the file is compressed, as a stream of their own."""
    compressor = compressor_like(os.pread(file.fileno(), 4, 0))
    if compressor is None or not lines:
        return lines
    return compressor.compress(lines) + compressor.finish()
