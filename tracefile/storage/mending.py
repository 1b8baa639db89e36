"""Mending a trace whose writer was killed: its complete records are kept, the torn end goes, and the file has an end.

It is mended in place and in one write, so that a full disk is no obstacle and a kill meanwhile costs nothing more.
Seals are the places at which a cut file can be closed: a plain file after any line end, a gzip stream after a flush, a
zstd frame after any block, by an empty last block and the checksum of the content before.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

import xxhash
import zstandard

from tracefile.records.decoding import KvtapeDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta
from tracefile.storage.appending import claim
from tracefile.storage.compression import GZIP_MAGIC, ZSTD_MAGIC, compression_of, compressor_like

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
            self.meta = decode_meta(parse_object(line, self._where).get("meta"), self._where)
            return True
        try:
            self._decoder.decode_without_faults(line, self._where)
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


READ_BYTES = 1 << 20
FLUSH_MARK = b"\x00\x00\xff\xff"
"""What a zlib flush ends with; data may hold it by chance."""
LAST_ZSTD_BLOCK = b"\x01\x00\x00"
LAST_DEFLATE_BLOCK = b"\x03\x00"
RLE_BLOCK, RESERVED_BLOCK = 1, 3
MAX_ZSTD_HEADER_BYTES = 18


class Seal(NamedTuple):
    """A place at which a file could end."""

    content: bytes
    """What the file says since the seal before."""
    offset: int
    """Bytes of the file up to here."""
    closing: bytes
    """What to write here, so that the stream has an end."""


class Unsealed(NamedTuple):
    """Content after the last seal, as far as it can be decoded; the file cannot be closed there."""

    content: bytes


def seals(file: IO[bytes]) -> Iterator[Seal | Unsealed]:
    """The file's content in pieces, each up to where the file could end right after a line; damage ends it silently."""
    head = file.read(4)
    file.seek(0)
    walks = {"plain": _plain_pieces, "gzip": _gzip_pieces, "zstd": _zstd_pieces}
    held = b""
    for piece in walks[compression_of(head)](file):
        held = held + piece.content if held else piece.content
        if isinstance(piece, Seal) and (held.endswith(b"\n") or not held):
            yield Seal(held, piece.offset, piece.closing)
            held = b""
    if held:
        yield Unsealed(held)


def _plain_pieces(file: IO[bytes]) -> Iterator[Seal | Unsealed]:
    offset, rest = 0, b""
    while data := file.read(READ_BYTES):
        whole, end, rest = (rest + data).rpartition(b"\n")
        if end:
            offset += len(whole) + 1
            yield Seal(whole + end, offset, b"")
    if rest:
        yield Unsealed(rest)


def _gzip_pieces(file: IO[bytes]) -> Iterator[Seal | Unsealed]:
    member = _GzipMember()
    offset = 0
    for data in _cut_after_flushes(file):
        left = data
        while left and not member.damaged:
            if member.ended:
                member = _GzipMember()
            content = member.inflate(left)
            offset += len(left) - len(member.unused)
            left = member.unused
            closing = member.closing()
            yield Unsealed(content) if closing is None else Seal(content, offset, closing)


class _GzipMember:
    """A gzip stream being read, with the values of its trailer so far."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(wbits=31)
        self._crc, self._length = 0, 0
        self.damaged = False

    @property
    def ended(self) -> bool:
        return self._inflater.eof

    @property
    def unused(self) -> bytes:
        return self._inflater.unused_data

    def inflate(self, data: bytes) -> bytes:
        before = self._inflater.copy()
        try:
            content = self._inflater.decompress(data)
        except zlib.error:
            self.damaged = True
            return _inflated_before_damage(before, data)
        self._crc = zlib.crc32(content, self._crc)
        self._length += len(content)
        return content

    def closing(self) -> bytes | None:
        """The bytes that end the stream here; None if it cannot end here, which zlib itself is asked."""
        if self.damaged:
            return None
        if self._inflater.eof:
            return b""
        trailer = LAST_DEFLATE_BLOCK + struct.pack("<II", self._crc, self._length & 0xFFFFFFFF)
        trial = self._inflater.copy()
        try:
            more = trial.decompress(trailer)
        except zlib.error:
            return None
        return trailer if trial.eof and not more and not trial.unused_data else None


def _inflated_before_damage(inflater: "zlib._Decompress", data: bytes) -> bytes:
    content = bytearray()
    with contextlib.suppress(zlib.error):
        for at in range(len(data)):
            content += inflater.decompress(data[at : at + 1])
    return bytes(content)


def _cut_after_flushes(file: IO[bytes]) -> Iterator[bytes]:
    """The file in pieces, one of which ends after each mark of a flush."""
    held = b""
    while data := file.read(READ_BYTES):
        *flushed, rest = (held + data).split(FLUSH_MARK)
        yield from (piece + FLUSH_MARK for piece in flushed)
        unmarked = max(0, len(rest) - len(FLUSH_MARK) + 1)
        yield rest[:unmarked]
        held = rest[unmarked:]
    yield held


def _zstd_pieces(file: IO[bytes]) -> Iterator[Seal | Unsealed]:
    while True:
        start = file.tell()
        header = file.read(MAX_ZSTD_HEADER_BYTES)
        try:
            size = zstandard.frame_header_size(header)
            frame = zstandard.get_frame_parameters(header)
        except zstandard.ZstdError:
            return
        file.seek(start + size)
        inflater = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        inflater.decompress(header[:size])
        open_ended = frame.content_size == zstandard.CONTENTSIZE_UNKNOWN
        yield from _zstd_blocks(file, inflater, checksum=frame.has_checksum, open_ended=open_ended)
        if not inflater.eof:
            return


def _zstd_blocks(
    file: IO[bytes], inflater: "zstandard.ZstdDecompressionObj", *, checksum: bool, open_ended: bool
) -> Iterator[Seal | Unsealed]:
    """Read a frame's blocks; each can be the last, unless the frame's header gives its length."""
    digest = xxhash.xxh64()
    while not inflater.eof:
        head = file.read(3)
        bits = int.from_bytes(head, "little")
        last, kind = bits & 1, bits >> 1 & 3
        size = 1 if kind == RLE_BLOCK else bits >> 3
        body = file.read(size)
        if len(head) < 3 or kind == RESERVED_BLOCK:
            return
        try:
            content = inflater.decompress(head + body)
        except zstandard.ZstdError:
            return
        if len(body) < size:  # of a block that is not compressed, a part can be read
            yield Unsealed(content)
            return
        digest.update(content)
        sum_bytes = (digest.intdigest() & 0xFFFFFFFF).to_bytes(4, "little") if checksum else b""
        if not last:
            yield Seal(content, file.tell(), LAST_ZSTD_BLOCK + sum_bytes) if open_ended else Unsealed(content)
            continue
        end, found = file.tell(), file.read(len(sum_bytes))
        if sum_bytes.startswith(found):
            yield Seal(content, end + len(found), sum_bytes[len(found) :])
        inflater.decompress(sum_bytes)
        if found != sum_bytes:
            return
