"""Reading traces of any known format, larger than memory or cut short, in one file or in segments."""

import os
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator
from typing import Any

from tracefile.files.columns import columns_reader
from tracefile.importers.blocktraces import (
    AIPERF_TEXTS,
    BAILIAN_KEYS,
    AiperfMooncakeDecoder,
    BailianDecoder,
    MooncakeDecoder,
)
from tracefile.importers.csvtraces import AZURE_COLUMNS, BURSTGPT_COLUMNS, AzureDecoder, BurstGptDecoder, has_columns
from tracefile.importers.vcr import VcrDecoder
from tracefile.parquet.layout import is_parquet
from tracefile.records.decoding import KvtapeDecoder, RecordDecoder, decode_meta, is_header, is_object, parse_object
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import SCHEMA, Meta, Record, TraceFormat
from tracefile.storage.lines import LineReader
from tracefile.storage.output import MANIFEST, MODEL, PAGE
from tracefile.storage.remote import given_path
from tracefile.storage.segments import absent_segments, open_lines, trace_files

CSV_FORMATS: Collection[TraceFormat] = ("burstgpt", "azure")
"""Formats without JSON: a last line without its end is not torn."""
MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}
SHARED_BY_SEGMENTS = ("source", "epoch_unix_ns", "block_size", "hash")
"""Fields in which all headers of one trace agree."""


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
            trace_format, self._decoder, self._first = self._recognise()
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
        return [*self._decoder.warnings, *self._warnings, *super().warnings]

    def close(self) -> None:
        self._lines.close()

    def _recognise(self) -> tuple[TraceFormat, RecordDecoder, bytes | None]:
        """Return the format by the first line, its decoder, and that line if it is a record already."""
        first = next(self._lines, None)
        where = f"{self._lines.path}:{self._lines.number or 1}"
        if first is None:
            raise InputError(f'{where}: no lines; expected a trace, which begins with {{"meta": …}}')
        if other := _other_kind(first, self._lines):
            raise InputError(f"{self._lines.path}: {other}, not a trace")
        if not self._lines.complete and first.startswith(b"{") and not is_object(first):
            raise InputError(f"{where}: cut short in its first line; expected a trace")
        found, decoder, is_record = recognise(first, where)
        return found, decoder, first if is_record else None

    def results(self) -> Iterator[Record | InputError]:
        if self._first is not None:
            yield self._decode(self._first)
        yield from self._rest_of_file()
        for path in self._files[1:]:
            self._starts.append(self.line)
            self._lines.close()
            self._lines = open_lines(path)
            yield from self._rest_of_file()

    def _rest_of_file(self) -> Iterator[Record | InputError]:
        for line in self._lines:
            if self._is_torn(line):
                self._note_end("torn last line skipped; its writer was cut short")
                return
            if not is_header(line):
                yield self._decode(line)
            elif error := self._take_header(line):
                yield error
        if self._lines.torn:
            self._note_end(f"{self._lines.torn} after this line; read what there was")

    def _note_end(self, fault: str) -> None:
        """Note that a file has no end: a fault, unless its writer is still at it."""
        if self._lines.is_being_written():
            self._warnings.append(f"{self.where()}: still being written; read up to here")
        else:
            self.faults.append((self.line, fault))

    def _is_torn(self, line: bytes) -> bool:
        return not self._lines.complete and self.format not in CSV_FORMATS and not is_object(line)

    def _take_header(self, line: bytes) -> InputError | None:
        """Take a later header; return the error if its records are on another clock or in other blocks."""
        where = self.where()
        found = parse_object(line, where)["meta"]
        try:
            later = decode_meta(found if isinstance(found, dict) else {}, where)
            check_continues(self.meta, later, where)
        except InputError as error:
            return error
        self._later_meta = later
        return None

    def _decode(self, line: bytes) -> Record | InputError:
        try:
            return self._decoder.decode(line, f"{self._lines.path}:{self._lines.number}")
        except InputError as error:
            return error


def _other_kind(first: bytes, lines: LineReader) -> str | None:
    """Return the name of another kind of file of ours, told by its first line or, of indented JSON, by its second."""
    if first == b"{":
        first += next(lines, b"")
    return next((kind.name for kind in (MODEL, MANIFEST, PAGE) if kind.begins.match(first)), None)


def _absence(path: str) -> list[str]:
    absent = absent_segments(path)
    return [f"{path}: read without {len(absent)} of its segments ({absent[0]} …): not there any more"] if absent else []


def check_continues(first: Meta, later: Meta, where: str) -> None:
    """Raise InputError unless records under the two headers can stand in one trace."""
    for name in SHARED_BY_SEGMENTS:
        there, here = getattr(first, name), getattr(later, name)
        if here != there:
            raise InputError(f"{where}: meta.{name}: {here}; expected {there}, as in the trace's first header")


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace of any ``TraceFormat``, told by content; segments open by folder, manifest or the whole's name."""
    where = given_path(path)
    return columns_reader(where) if is_parquet(where) else LineTraceReader(where)


def load_trace(path: str | os.PathLike[str]) -> tuple[Meta, list[Record]]:
    """The whole trace in memory, in file order; warnings go to stderr."""
    with open_trace(path) as reader:
        records = list(reader)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return reader.meta, records


def recognise(line: bytes, where: str) -> tuple[TraceFormat, RecordDecoder, bool]:
    """A first line's format, by columns or keys, its decoder, and whether it is a record already; raises InputError."""
    if not line.startswith(b"{"):
        if has_columns(line, BURSTGPT_COLUMNS):
            return "burstgpt", BurstGptDecoder(line), False
        if has_columns(line, AZURE_COLUMNS):
            return "azure", AzureDecoder(line), False
        raise InputError(f'{where}: {_beginning(line)}; expected a trace, which begins with {{"meta": …}}')
    found = parse_object(line, where)
    meta = found.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where)), False
    if isinstance(meta, dict):
        return "vllm-vcr", VcrDecoder(meta, where), False
    return *_recognise_record(found, where), True


def _beginning(line: bytes) -> str:
    """Begin an error with the beginning of a line that is none of a trace."""
    text = line[:40].decode("utf-8", "replace")
    return f"begins with {text!r}{'…' if len(line) > 40 else ''}"


def _recognise_record(found: dict[str, Any], where: str) -> tuple[TraceFormat, RecordDecoder]:
    if found.keys() >= set(BAILIAN_KEYS):
        return "bailian", BailianDecoder()
    if found.keys() >= MOONCAKE_KEYS and not found.keys() & {"session_id", "delay"}:
        return "mooncake", MooncakeDecoder()
    if "input_length" in found or found.keys() & set(AIPERF_TEXTS):
        return "aiperf-mooncake", AiperfMooncakeDecoder()
    if "prompt_tokens" in found and "request_id" not in found:
        return "vllm-vcr", VcrDecoder({}, where)
    raise InputError(
        f"{where}: neither a trace's header nor a record of a known format; "
        f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a Mooncake, Bailian, BurstGPT, Azure or vllm-vcr trace'
    )
