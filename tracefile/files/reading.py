"""Reading traces of any known format, larger than memory, cut short, in one file or in segments."""

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tracefile.files.mooncake import MOONCAKE_KEYS, MooncakeDecoder
from tracefile.records.decoding import (
    KvtapeDecoder,
    LineDecoder,
    OutOfBoundsError,
    RecordColumns,
    decode_meta,
    is_header,
    is_object,
    joined_records,
    parse_object,
    without_times,
)
from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA, HashInfo, Meta, Record, TraceFormat
from tracefile.storage.output import MANIFEST, MODEL, PAGE, PARQUET
from tracefile.storage.remote import given_path
from tracefile.storage.segments import absent_segments, open_lines, trace_files

if TYPE_CHECKING:
    from tracefile.records.batches import Batch

SHARED_BY_SEGMENTS = ("source", "epoch_unix_ns", "block_size", "hash")
"""Fields in which all headers of one trace agree."""
BATCH = 1 << 11
"""Lines that make a batch, at least."""
BLOCK_PARTS = 8
"""Parts of what one read gives, a megabyte, that are decoded one after another: objects take several times the room."""


class TraceReader:
    """A trace's header, then its records one by one; a context manager and an iterator.

    A trace is JSON lines, or segments of them; all its headers agree on clock, blocks and hashes. A last line that a
    killed writer left torn is no error: iteration ends before it, and ``warnings`` says so. Everything else malformed
    raises InputError with ``file:line: field``. Constant memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files = trace_files(path)
        self._starts = [0]
        """Lines before each file that was opened so far."""
        self._lines = open_lines(self._files[0])
        self._later_meta: Meta | None = None
        self._notes = _absence(self.path)
        self.faults: list[tuple[int, str]] = []
        """Ends that files lack, each with its line: a check's findings. Complete after the last record."""
        self._first_set_aside = ""
        self._set_aside = 0
        try:
            first, where = self._first_line()
            self.format, self._decoder = recognise(first, where)
            self._begun = [] if self.format == "kvtape" else [first]
        except BaseException:
            self._lines.close()
            raise
        self._records = self._without_faults(self.results())

    @property
    def meta(self) -> Meta:
        """The trace's first header; for imported formats, as far as the format has one."""
        return self._decoder.meta

    @property
    def latest_meta(self) -> Meta:
        """The last header before the latest record: a trace may go on with another engine."""
        return self._later_meta or self._decoder.meta

    @property
    def line(self) -> int:
        """Line of the latest record, from 1; counted through all segments."""
        return self._starts[-1] + self._lines.number

    def where(self, line: int | None = None) -> str:
        """``file:line`` of a line read (default: the latest); in a trace of segments, of the segment's file."""
        line = self.line if line is None else line
        at = max(0, bisect_right(self._starts, line - 1) - 1)
        return f"{self._files[at]}:{line - self._starts[at]}"

    @property
    def warnings(self) -> list[str]:
        """Everything skipped, dropped or assumed so far, a sentence each; complete after the last record."""
        found = [*self._notes, *(f"{self.where(line)}: {what}" for line, what in self.faults)]
        if self._set_aside:
            count = f"{self._set_aside} records have values out of bounds, read as unknown"
            found.append(f"{self.path}: {count}; the first: {self._first_set_aside}")
        return found

    def close(self) -> None:
        """Close the file; records not read yet are lost."""
        self._lines.close()

    def batches(self) -> "Iterator[Batch]":
        """Iterate over the records in groups, with their fields as arrays."""
        # A tap's workers read headers only and must not import NumPy.
        from tracefile.records.batches import Batch  # noqa: PLC0415

        return map(Batch, self._groups())

    def requests(self) -> list[Record] | RecordColumns:
        """Return all records that are left, without the times of tokens that are counted."""
        return joined_records(list(map(without_times, self._groups())))

    def _groups(self) -> Iterator[list[Record] | RecordColumns]:
        lines: list[bytes] = []
        for block in self._blocks():
            self._lines.number += len(block)
            lines += block
            if len(lines) < BATCH and block:
                continue
            records = self._decoder.decode_block(lines)
            if records is None:
                self._lines.number -= len(lines)
                records = list(self._without_faults(self._each(lines)))
            if records:
                yield records
            lines = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def __next__(self) -> Record:
        return next(self._records)

    def _without_faults(self, results: Iterator[Record | InputError]) -> Iterator[Record]:
        """Yield the records, those with values out of bounds without these; raises any other error."""
        for result in results:
            if not isinstance(result, InputError):
                yield result
            elif isinstance(result, OutOfBoundsError):
                self._set_aside += 1
                self._first_set_aside = self._first_set_aside or str(result)
                yield result.record
            else:
                raise result

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
        """Iterate as over the reader, but yield a bad line's InputError and go on with the next line."""
        for block in self._blocks():
            step = len(block) // BLOCK_PARTS + 1
            for first in range(0, len(block), step):
                lines = block[first : first + step]
                records = self._decoder.decode_block(lines)
                yield from self._each(lines) if records is None else self._counted(records)

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the lines of each read, for the caller to count; an empty list: before more come."""
        self._lines.number -= len(self._begun)
        yield self._begun
        yield from self._blocks_of_file()
        for path in self._files[1:]:
            self._starts.append(self.line)
            self._lines.close()
            self._lines = open_lines(path)
            yield from self._blocks_of_file()

    def _blocks_of_file(self) -> Iterator[list[bytes]]:
        while block := self._lines.take_block():
            if not (self._lines.complete or block[-1].isspace() or is_object(block[-1])):
                break  # a torn line
            yield block
        yield []
        if block:
            self._lines.number += 1
            self._note_end("torn last line skipped; its writer was cut short")
        elif self._lines.torn:
            self._note_end(f"{self._lines.torn} after this line; read what there was")

    def _counted(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            self._lines.number += 1
            yield record

    def _each(self, lines: list[bytes]) -> Iterator[Record | InputError]:
        """Yield the results of lines one by one."""
        for line in lines:
            self._lines.number += 1
            if line and not line.isspace():
                yield from self._decode_line(line)

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
            self._notes.append(f"{self.where()}: still being written; read up to here")
        else:
            self.faults.append((self.line, fault))

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
    return TraceReader(given_path(path))


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
