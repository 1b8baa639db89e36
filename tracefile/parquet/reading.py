"""Reading a trace in columns, row group by row group, as the records that were written."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import arrow_schema
from tracefile.parquet.batch import ColumnBatch
from tracefile.parquet.layout import FOOTER_KEY, Footer
from tracefile.parquet.rows import group_records
from tracefile.records.batches import Batch, RecordBatch
from tracefile.records.decoding import decode_meta
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
        """``file: row n`` of a row read (default: the latest)."""
        return f"{self.path}: row {self._row if line is None else line}"

    @property
    def warnings(self) -> list[str]:
        return []  # a file in columns is whole or unreadable

    def close(self) -> None:
        self._file.close()

    def column(self, name: str) -> Iterator[pa.Array]:
        """Iterate over one column alone, a row group at a time."""
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
