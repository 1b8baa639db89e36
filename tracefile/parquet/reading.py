"""Reading a trace in columns, row group by row group, as the records that were written."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import CHAIN_COLUMNS, allowed_words, arrow_schema
from tracefile.parquet.layout import FOOTER_KEY, REST, Footer
from tracefile.parquet.rows import faults_of, group_records, rest_of, texts_of
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import NO_LIST, Batch, Hashes, RecordBatch
from tracefile.records.decoding import decode_meta
from tracefile.records.encoding import known_fields
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Meta, Record

NEVER_NULL = ("itl_ms", "itl_tokens", "new_hashes")
"""Lists that every row has."""


class ColumnsReader(TraceReader):
    """A trace in columns, read as any other; its lines are rows, from 1. Memory follows a row group."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "kvtape")
        self._file = _open(self.path)
        self.footer = _footer(self._file, self.path)
        where = f"{self.path}: meta"
        self._metas = [(row, decode_meta(meta, where)) for row, meta in self.footer.metas]
        self._row = 0

    @property
    def meta(self) -> Meta:
        return self._metas[0][1]

    @property
    def latest_meta(self) -> Meta:
        return next(meta for row, meta in reversed(self._metas) if row == 0 or row < self._row)

    @property
    def line(self) -> int:
        return self._row

    def where(self, line: int | None = None) -> str:
        return f"{self.path}: row {self._row if line is None else line}"

    @property
    def warnings(self) -> list[str]:
        return []  # a file in columns is whole or unreadable

    def close(self) -> None:
        self._file.close()

    def column(self, name: str) -> Iterator[pa.Array]:
        for group in range(self._file.num_row_groups):
            yield self._file.read_row_group(group, columns=[name]).column(0).combine_chunks()

    def results(self) -> Iterator[Record | InputError]:
        for group in range(self._file.num_row_groups):
            count = self._file.metadata.row_group(group).num_rows
            for result in group_records(self._group(group), count, self.path, self._row):
                self._row += 1
                yield result

    def batches(self) -> Iterator[Batch]:
        """Iterate over row groups: as columns, or as records where a row has values without a column."""
        for group in range(self._file.num_row_groups):
            batch = ColumnBatch(self._group(group), self._file.metadata.row_group(group).num_rows, self.path, self._row)
            if batch.is_plain:
                self._row += len(batch)
                yield batch
                continue
            records = []
            for result in batch.results():
                if isinstance(result, InputError):
                    raise result
                self._row += 1
                records.append(result)
            yield RecordBatch(records)

    def _group(self, group: int) -> dict[str, pa.Array]:
        try:
            table = self._file.read_row_group(
                group, use_threads=False, columns=_columns_with_values(self._file.metadata.row_group(group))
            )
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.path}: row {self._row + 1}: damaged ({error}); expected a whole file") from None
        return {name: table.column(name).combine_chunks() for name in table.column_names}


def _columns_with_values(group: Any) -> list[str]:
    """Names of the columns that are not all null, or all empty lists, as far as the row group's statistics say."""
    return list(
        dict.fromkeys(
            column.path_in_schema.partition(".")[0]
            for column in map(group.column, range(group.num_columns))
            if not _is_empty(column)
        )
    )


def _is_empty(column: Any) -> bool:
    name, nested, _ = column.path_in_schema.partition(".")
    if nested and name not in NEVER_NULL:  # there, an empty one is not a null
        return False
    said = column.statistics
    return said is not None and bool(said.has_null_count) and bool(said.null_count == column.num_values)


def footer_of(path: str | os.PathLike[str]) -> Footer:
    """Return the file's own description; raises InputError if it is no kvtape trace."""
    with _open(os.fspath(path)) as file:
        return _footer(file, os.fspath(path))


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a trace file") from error
    except pa.ArrowException as error:
        raise InputError(f"{path}: damaged or cut short ({error}); expected a whole Parquet file") from None


def _footer(file: pq.ParquetFile, path: str) -> Footer:
    said = (file.metadata.metadata or {}).get(FOOTER_KEY)
    if said is None:
        raise InputError(f"{path}: Parquet, but not of a trace; expected one that tracefile wrote")
    try:
        footer = msgspec.json.decode(said, type=Footer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {FOOTER_KEY.decode()}: {error}; expected a trace's description") from None
    if not footer.metas or footer.records != file.metadata.num_rows:
        raise InputError(
            f"{path}: {file.metadata.num_rows} rows; expected the {footer.records} that tracefile wrote, "
            "as no other tool keeps their chains of hashes whole"
        )
    there = file.schema_arrow
    for name in arrow_schema().names:
        if name in there.names and there.field(name).type != arrow_schema().field(name).type:
            raise InputError(f"{path}: {name}: {there.field(name).type}; expected {arrow_schema().field(name).type}")
    return footer


class ColumnBatch:
    """A row group's columns; one that is not there has nothing to say."""

    def __init__(self, columns: dict[str, pa.Array], count: int, path: str, first_row: int) -> None:
        self._columns = columns
        self._count = count
        self._path = path
        self._first_row = first_row
        self._hashes: Hashes | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_plain(self) -> bool:
        """Return whether every row is a record that its columns hold all of, but for unknown fields."""
        rest = rest_of(self._columns, self._path, self._first_row)
        if rest is not None and not all(other is None or known_fields(Record).isdisjoint(other) for other in rest):
            return False
        names = (name for name in (*allowed_words(), "request_id") if name in self._columns)
        checked = {name: texts_of(self._columns[name]) for name in names}
        return "request_id" in checked and not faults_of(checked, self._count)

    def results(self) -> Iterator[Record | InputError]:
        return group_records(self._columns, self._count, self._path, self._first_row)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        column = self._columns.get(name)
        if column is None:
            return np.full(self._count, missing, np.int64)
        return np.asarray(column.fill_null(missing).to_numpy(zero_copy_only=False), np.int64)

    def times(self, name: str) -> FloatArray:
        column = self._columns.get(name)
        if column is None:
            return np.full(self._count, np.nan)
        return np.asarray(column.fill_null(np.nan).to_numpy(zero_copy_only=False), np.float64)

    def words(self, name: str) -> Sequence[str | None]:
        return texts_of(self._columns[name]) if name in self._columns else [None] * self._count

    def lengths(self, name: str) -> IntArray:
        column = self._columns.get(name)
        if column is None:
            return np.zeros(self._count, np.int64)
        return np.asarray(np.diff(column.offsets.to_numpy()), np.int64)

    def hashes(self) -> Hashes:
        if self._hashes is None:
            self._hashes = self._decoded_hashes()
            for name in CHAIN_COLUMNS:
                self._columns.pop(name, None)
        return self._hashes

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._columns.pop(REST if name == "extra" else name, None)

    def records(self, rows: IntArray | None = None) -> list[Record]:
        hashes = self.hashes()
        rows = np.arange(self._count) if rows is None else rows
        at = pa.array(rows)
        taken = {name: column.take(at) for name, column in self._columns.items()}
        found = []
        for record, row in zip(group_records(taken, len(rows), self._path, 0), rows.tolist(), strict=True):
            assert isinstance(record, Record)  # as the batch is plain
            start, prompt, output = (int(part[row]) for part in hashes[1:])
            middle, end = start + max(prompt, 0), start + max(prompt, 0) + max(output, 0)
            if prompt != NO_LIST:
                record.block_hashes = hashes.values[start:middle].tolist()
            if output != NO_LIST:
                record.output_block_hashes = hashes.values[middle:end].tolist()
            found.append(record)
        return found

    def _decoded_hashes(self) -> Hashes:
        prompts, outputs = self.numbers("prompt_blocks", NO_LIST), self.numbers("output_blocks", NO_LIST)
        prefix_rows, prefix_blocks = self.numbers("prefix_row"), self.numbers("prefix_blocks")
        new_counts = self.lengths("new_hashes")
        counts = prefix_blocks + new_counts
        self._check_prefixes(prefix_rows, prefix_blocks, counts)
        starts = np.cumsum(counts) - counts
        values = np.empty(int(counts.sum()), np.uint64)
        if "new_hashes" in self._columns:
            column = self._columns["new_hashes"]
            first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
            is_new = np.arange(len(values)) >= np.repeat(starts + prefix_blocks, counts)
            values[is_new] = column.values.to_numpy()[first:last]
        shares = np.flatnonzero(prefix_blocks)
        for start, count, other in zip(
            starts[shares].tolist(), prefix_blocks[shares].tolist(), starts[prefix_rows[shares]].tolist(), strict=True
        ):
            values[start : start + count] = values[other : other + count]
        return Hashes(values, starts, prompts, outputs)

    def _check_prefixes(self, rows: IntArray, blocks: IntArray, counts: IntArray) -> None:
        wrong = (blocks > 0) & ((rows < 0) | (rows >= np.arange(self._count)))
        wrong |= (blocks < 0) | (counts[np.where(wrong, 0, rows)] < blocks)
        for row in np.flatnonzero(wrong)[:1].tolist():
            raise InputError(
                f"{self._path}: row {self._first_row + row + 1}: prefix_row: {rows[row]} for {blocks[row]} blocks; "
                "expected an earlier row that has them"
            )
