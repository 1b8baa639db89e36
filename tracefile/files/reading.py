"""Reader of traces in any supported format: larger than memory, truncated, in one file or in segments."""

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
"""Header fields that are equal in all segments of a trace."""
BATCH = 1 << 11
"""Minimum lines of a batch."""
BLOCK_PARTS = 8
"""Parts in which the lines of a read (1 MB) are decoded: decoded objects take several times the memory."""


class TraceReader:
    """Iterator over the records of a trace, and a context manager; constant memory.

    A trace is a JSON Lines file, or segments; all headers agree on clock, block size and hashes. A torn last line of a
    killed writer is skipped with a warning. Any other malformed line raises InputError with ``file:line: field``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files = trace_files(path)
        self._starts = [0]
        """Number of lines before each file opened so far."""
        self._lines = open_lines(self._files[0])
        self._later_meta: Meta | None = None
        self._notes = _missing_segments(self.path)
        self.faults: list[tuple[int, str]] = []
        """Truncated ends of files, by line, for ``tracefile check``; complete after the last record."""
        self._first_out_of_bounds = ""
        self._out_of_bounds = 0
        try:
            first, where = self._first_line()
            self.format, self._decoder = detect_format(first, where)
            self._lookahead = [] if self.format == "kvtape" else [first]
        except BaseException:
            self._lines.close()
            raise
        self._records = self._without_faults(self.results())

    @property
    def meta(self) -> Meta:
        """First header of the trace; for imported formats, the fields that the format has."""
        return self._decoder.meta

    @property
    def latest_meta(self) -> Meta:
        """Header of the latest record: the engine may change within a trace."""
        return self._later_meta or self._decoder.meta

    @property
    def line(self) -> int:
        """Line number of the latest record, from 1, over all segments."""
        return self._starts[-1] + self._lines.number

    def where(self, line: int | None = None) -> str:
        """Return ``file:line`` of a line (default: the latest), in the segment's file."""
        line = self.line if line is None else line
        at = max(0, bisect_right(self._starts, line - 1) - 1)
        return f"{self._files[at]}:{line - self._starts[at]}"

    @property
    def warnings(self) -> list[str]:
        """Everything skipped, dropped or assumed so far; complete after the last record."""
        warnings = [*self._notes, *(f"{self.where(line)}: {fault}" for line, fault in self.faults)]
        if self._out_of_bounds:
            count = f"{self._out_of_bounds} records have values out of bounds, read as unknown"
            warnings.append(f"{self.path}: {count}; the first: {self._first_out_of_bounds}")
        return warnings

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def batches(self) -> "Iterator[Batch]":
        """Iterate over batches of records, with their fields as arrays."""
        # A tap's workers read headers only and must not import NumPy.
        from tracefile.records.batches import Batch  # noqa: PLC0415

        return map(Batch, self._groups())

    def requests(self) -> list[Record] | RecordColumns:
        """Return all remaining records, without token times where ``output_tokens`` is known."""
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
                records = list(self._without_faults(self._decode_lines(lines)))
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
        """Yield the records, with values out of bounds removed; raises any other error."""
        for result in results:
            if not isinstance(result, InputError):
                yield result
            elif isinstance(result, OutOfBoundsError):
                self._out_of_bounds += 1
                self._first_out_of_bounds = self._first_out_of_bounds or str(result)
                yield result.record
            else:
                raise result

    def _first_line(self) -> tuple[bytes, str]:
        """Return the first line and its ``file:line``; raises InputError for a file that is not a trace."""
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
        """Iterate over records; a malformed line yields its InputError, and iteration continues."""
        for block in self._blocks():
            step = len(block) // BLOCK_PARTS + 1
            for first in range(0, len(block), step):
                lines = block[first : first + step]
                records = self._decoder.decode_block(lines)
                yield from self._decode_lines(lines) if records is None else self._count_lines(records)

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the lines of each read, which the caller adds to the line number; an empty list ends a file."""
        self._lines.number -= len(self._lookahead)
        yield self._lookahead
        yield from self._blocks_of_file()
        for path in self._files[1:]:
            self._starts.append(self.line)
            self._lines.close()
            self._lines = open_lines(path)
            yield from self._blocks_of_file()

    def _blocks_of_file(self) -> Iterator[list[bytes]]:
        while block := self._lines.next_block():
            if not (self._lines.complete or block[-1].isspace() or is_object(block[-1])):
                break  # a torn line
            yield block
        yield []
        if block:
            self._lines.number += 1
            self._note_end("torn last line skipped; its writer was cut short")
        elif self._lines.torn:
            self._note_end(f"{self._lines.torn} after this line; read up to it")

    def _count_lines(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            self._lines.number += 1
            yield record

    def _decode_lines(self, lines: list[bytes]) -> Iterator[Record | InputError]:
        for line in lines:
            self._lines.number += 1
            if line and not line.isspace():
                yield from self._decode_line(line)

    def _decode_line(self, line: bytes) -> Sequence[Record | InputError]:
        if not is_header(line):
            return (self._decode(line),)
        error = self._apply_header(line)
        return () if error is None else (error,)

    def _decode(self, line: bytes) -> Record | InputError:
        try:
            return self._decoder.decode(line, f"{self._lines.path}:{self._lines.number}")
        except InputError as error:
            return error

    def _note_end(self, fault: str) -> None:
        """Add a truncated end of a file: a fault, unless the file is still being written."""
        if self._lines.is_being_written():
            self._notes.append(f"{self.where()}: still being written; read up to this line")
        else:
            self.faults.append((self.line, fault))

    def _apply_header(self, line: bytes) -> InputError | None:
        """Apply a later header; return the error if its clock, block size or hashes differ."""
        where = self.where()
        try:
            later = decode_meta(parse_object(line, where)["meta"], where)
            check_continues(self.meta, later, where)
        except InputError as error:
            return error
        self._later_meta = later
        return None


def detect_format(line: bytes, where: str) -> tuple[TraceFormat, LineDecoder]:
    """Detect the trace format from the first line; return it with its decoder. Raises InputError for no trace."""
    if not line.startswith(b"{"):
        text = line[:40].decode("utf-8", "replace")
        begins = f"begins with {text!r}{'…' if len(line) > 40 else ''}"
        raise InputError(f'{where}: {begins}; expected a trace, which begins with {{"meta": …}}')
    fields = parse_object(line, where)
    meta = fields.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where))
    if fields.keys() >= MOONCAKE_KEYS:
        return "mooncake", MooncakeDecoder()
    expected = f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a Mooncake line'
    raise InputError(f"{where}: neither a trace's header nor a record of a known format; {expected}")


def _missing_segments(path: str) -> list[str]:
    absent = [segment.name for segment in absent_segments(path) if not segment.deleted]
    return [f"{path}: read without {len(absent)} of its segments ({absent[0]} …): missing"] if absent else []


def check_continues(first: Meta, later: Meta, where: str) -> None:
    """Raise InputError unless records of the two headers can be in one trace."""
    for name in SHARED_BY_SEGMENTS:
        there, here = getattr(first, name), getattr(later, name)
        if here != there:
            here, there = (_hash_text(value) if isinstance(value, HashInfo) else value for value in (here, there))
            raise InputError(f"{where}: meta.{name}: {here}; expected {there}, as in the trace's first header")


def _hash_text(info: HashInfo) -> str:
    return f"{info.algorithm} with key {info.key_id}" + (", with branches" if info.branches else "")


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace; the format is detected by content. Segments: their folder, manifest, or the trace's name."""
    return TraceReader(given_path(path))


def load_trace(path: str | os.PathLike[str]) -> tuple[Meta, list[Record]]:
    """Load a complete trace into memory, in file order; warnings go to stderr."""
    # Not for a tap's workers, which read headers only and must not import NumPy.
    from tracefile.records.batches import without_collector  # noqa: PLC0415

    with open_trace(path) as reader:
        with without_collector():
            records = list(reader)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return reader.meta, records
