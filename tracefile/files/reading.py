"""Reading traces of any known format, larger than memory, cut short or still growing, in one file or in segments."""

import contextlib
import os
import select
import stat
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracefile.files.mooncake import MOONCAKE_KEYS, MooncakeDecoder
from tracefile.records.decoding import (
    KvtapeDecoder,
    LineDecoder,
    decode_meta,
    is_header,
    is_object,
    parse_object,
)
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import SCHEMA, HashInfo, Meta, Record, TraceFormat
from tracefile.storage.output import MANIFEST, MODEL, PAGE, PARQUET
from tracefile.storage.remote import given_path
from tracefile.storage.segments import absent_segments, open_lines, segment_number, trace_files

SHARED_BY_SEGMENTS = ("source", "epoch_unix_ns", "block_size", "hash")
"""Fields in which all headers of one trace agree."""
BLOCK_PARTS = 8
"""Parts of what one read gives, a megabyte, that are decoded one after another: objects take several times the room."""


class LineTraceReader(TraceReader):
    """A trace of JSON (or CSV) lines or of segments of them; all its headers agree on clock, blocks and hashes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = trace_files(path)
        self._starts = [0]
        """Lines before each file that was opened so far."""
        self._lines = open_lines(self._files[0])
        self._later_meta: Meta | None = None
        self._warnings = _absence(os.fspath(path))
        try:
            first, where = self._first_line()
            trace_format, self._decoder = recognise(first, where)
            self._begun = [] if trace_format == "kvtape" else [self._decode(first)]
        except BaseException:
            self._lines.close()
            raise
        super().__init__(os.fspath(path), trace_format)

    @property
    def meta(self) -> Meta:
        return self._decoder.meta

    @property
    def latest_meta(self) -> Meta:
        return self._later_meta or self._decoder.meta

    @property
    def line(self) -> int:
        return self._starts[-1] + self._lines.number

    def where(self, line: int | None = None) -> str:
        line = self.line if line is None else line
        at = max(0, bisect_right(self._starts, line - 1) - 1)
        return f"{self._files[at]}:{line - self._starts[at]}"

    @property
    def warnings(self) -> list[str]:
        return [*self._warnings, *super().warnings]

    def close(self) -> None:
        self._lines.close()

    def _first_line(self) -> tuple[bytes, str]:
        """Return the first line and where it is; raises InputError for a file of another kind."""
        first = next(self._lines, None)
        where = f"{self._lines.path}:{self._lines.number or 1}"
        if first is None:
            raise InputError(f'{where}: no lines; expected a trace, which begins with {{"meta": …}}')
        if is_object(first):
            return first, where
        if not self._lines.complete and first.startswith(b"{"):
            raise InputError(f"{where}: cut short in its first line; expected a trace")
        head = b"\n".join([first, next(self._lines, b"")])
        for kind in (MODEL, MANIFEST, PAGE, PARQUET):
            if kind.begins.match(head):
                raise InputError(f"{self._lines.path}: {kind.name}, not a trace")
        return first, where

    def results(self) -> Iterator[Record | InputError]:
        yield from self._begun
        yield from self._rest_of_file()
        for path in self._files[1:]:
            self._starts.append(self.line)
            self._lines.close()
            self._lines = open_lines(path)
            yield from self._rest_of_file()

    def _rest_of_file(self) -> Iterator[Record | InputError]:
        while block := self._lines.take_block():
            step = len(block) // BLOCK_PARTS + 1
            for first in range(0, len(block), step):
                yield from self._decode_block(block[first : first + step])
        for line in self._lines:
            if self._is_torn(line):
                self._note_end("torn last line skipped; its writer was cut short")
                return
            yield from self._decode_line(line)
        if self._lines.torn:
            self._note_end(f"{self._lines.torn} after this line; read what there was")

    def _decode_block(self, block: list[bytes]) -> Iterator[Record | InputError]:
        """Yield results of a block's lines: all at once where each is a plain record, else line by line."""
        records = self._decoder.decode_block(block)
        if records is None:
            for line in block:
                self._lines.number += 1
                if line and not line.isspace():
                    yield from self._decode_line(line)
            return
        for record in records:
            self._lines.number += 1
            yield record

    def _decode_line(self, line: bytes) -> Sequence[Record | InputError]:
        if not is_header(line):
            return (self._decode(line),)
        error = self._take_header(line)
        return () if error is None else (error,)

    def _decode(self, line: bytes) -> Record | InputError:
        try:
            return self._decoder.decode(line, f"{self._lines.path}:{self._lines.number}")
        except InputError as error:
            return error

    def _note_end(self, fault: str) -> None:
        """Note that a file has no end: a fault, unless its writer is still at it."""
        if self._lines.is_being_written():
            self._warnings.append(f"{self.where()}: still being written; read up to here")
        else:
            self.faults.append((self.line, fault))

    def _is_torn(self, line: bytes) -> bool:
        return not self._lines.complete and not is_object(line)

    def _take_header(self, line: bytes) -> InputError | None:
        """Take a later header; return the error if its records are on another clock or in other blocks."""
        where = self.where()
        try:
            later = decode_meta(parse_object(line, where)["meta"], where)
            check_continues(self.meta, later, where)
        except InputError as error:
            return error
        self._later_meta = later
        return None


def recognise(line: bytes, where: str) -> tuple[TraceFormat, LineDecoder]:
    """Return the format of a trace that begins with a line, and its decoder; raises InputError if it is none."""
    if not line.startswith(b"{"):
        text = line[:40].decode("utf-8", "replace")
        begins = f"begins with {text!r}{'…' if len(line) > 40 else ''}"
        raise InputError(f'{where}: {begins}; expected a trace, which begins with {{"meta": …}}')
    found = parse_object(line, where)
    meta = found.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where))
    if found.keys() >= MOONCAKE_KEYS:
        return "mooncake", MooncakeDecoder()
    expected = f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a line of Mooncake\'s'
    raise InputError(f"{where}: neither a trace's header nor a record of a known format; {expected}")


def _absence(path: str) -> list[str]:
    absent = [segment.name for segment in absent_segments(path) if not segment.deleted]
    return [f"{path}: read without {len(absent)} of its segments ({absent[0]} …): not there any more"] if absent else []


def check_continues(first: Meta, later: Meta, where: str) -> None:
    """Raise InputError unless records under the two headers can stand in one trace."""
    for name in SHARED_BY_SEGMENTS:
        there, here = getattr(first, name), getattr(later, name)
        if here != there:
            here, there = (_key_words(value) if isinstance(value, HashInfo) else value for value in (here, there))
            raise InputError(f"{where}: meta.{name}: {here}; expected {there}, as in the trace's first header")


def _key_words(told: HashInfo) -> str:
    return f"{told.algorithm} under key {told.key_id}" + (", with branches" if told.branches else "")


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace of any ``TraceFormat``, told by content; segments open by folder, manifest or the whole's name."""
    return LineTraceReader(given_path(path))


def load_trace(path: str | os.PathLike[str]) -> tuple[Meta, list[Record]]:
    """The whole trace in memory, in file order; warnings go to stderr."""
    # Not for a tap's workers, which read headers only and must not import NumPy.
    from tracefile.records.batches import without_collector  # noqa: PLC0415

    with open_trace(path) as reader:
        with without_collector():
            records = list(reader)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return reader.meta, records


class FollowedTrace:
    """A trace of JSON lines that grows, in one file or in segments; every look reads its last file again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.meta: Meta | None = None
        """The latest header. None: no line has been written yet."""
        self.unreadable = 0
        """Lines that are no records."""
        self._decoder: KvtapeDecoder | None = None
        self._number = segment_number(Path(trace_files(path)[-2:][0]))
        """Of the file read last: at first the one before the one that is written."""
        self._seen = 0
        """Lines of it that were read."""

    def new_records(self) -> Iterator[Record]:
        """Yield the records written since the last call. Raises InputError if the trace is not there."""
        for file in trace_files(self.path):
            number = segment_number(Path(file))
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._seen = number, 0
            with open_lines(file) as lines:
                for line in lines:
                    if lines.complete and lines.number > self._seen:
                        self._seen = lines.number
                        yield from self._decoded(line, f"{lines.path}:{lines.number}")

    def _decoded(self, line: bytes, where: str) -> Iterator[Record]:
        if self._decoder is None:
            name, decoder = recognise(line, where)
            if not isinstance(decoder, KvtapeDecoder):
                raise InputError(f"{where}: a trace of format {name}; expected one that kvtape writes, to follow it")
            self._decoder, self.meta = decoder, decoder.meta
        elif is_header(line):
            self.meta = decode_meta(parse_object(line, where)["meta"], where)
        else:
            try:
                yield self._decoder.decode(line, where)
            except InputError:
                self.unreadable += 1


def wait_for_more(seconds: float) -> bool:
    """Sleep; return False, at once, if standard input is a pipe and its writer has closed it: our parent has left."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            readable, _, _ = select.select([sys.stdin], [], [], seconds)
            return not readable or bool(os.read(sys.stdin.fileno(), 1 << 16))
    time.sleep(seconds)
    return True
