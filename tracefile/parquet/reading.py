"""Reading a trace in columns, row group by row group, as the records that were written."""

import math
import os
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import FOOTER_KEY, REST, Footer, arrow_schema
from tracefile.records.decoding import NOT_JSON, convert_record, decode_meta
from tracefile.records.errors import InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Meta, Record
from tracefile.storage.remote import is_url, open_file

DAMAGED = (OSError, UnicodeDecodeError, pa.ArrowException)


class ColumnsReader(TraceReader):
    """A trace in columns, read as any other; its lines are rows, from 1. Memory follows a row group."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "kvtape")
        self._file = _open(self.path)
        self.footer = _footer(self._file, self.path)
        where = f"{self.path}: meta"
        self._metas = [(row, decode_meta(meta, where)) for row, meta in self.footer.metas]
        self._row = 0
        self._over = False
        """True once the last record was read: a header may come after it."""

    @property
    def meta(self) -> Meta:
        return self._metas[0][1]

    @property
    def latest_meta(self) -> Meta:
        return next(meta for row, meta in reversed(self._metas) if self._over or row == 0 or row < self._row)

    @property
    def line(self) -> int:
        return self._row

    def where(self, line: int | None = None) -> str:
        return f"{self.path}: row {self._row if line is None else line}"

    def close(self) -> None:
        self._file.close()

    def results(self) -> Iterator[Record | InputError]:
        for group in range(self._file.num_row_groups):
            try:
                table = self._file.read_row_group(group, use_threads=False)
            except DAMAGED as error:
                where = f"{self.path}: row {self._row + 1}"
                raise InputError(f"{where}: damaged ({error}); expected a whole file") from None
            for fields in _rows(table):
                self._row += 1
                yield self._record(fields)
        self._over = True

    def _record(self, fields: dict[str, Any]) -> Record | InputError:
        where = f"{self.path}: row {self._row}"
        try:
            rest = msgspec.json.decode(fields.pop(REST, "{}"), type=dict[str, Any])
            return convert_record(fields | rest, where)
        except NOT_JSON as error:
            return InputError(f"{where}: {REST}: {error}; expected a JSON object")
        except InputError as error:
            return error


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield each row's values by column, without nulls."""
    names = [name for name in table.column_names if table.column(name).null_count < table.num_rows]
    columns = [_python_values(table.column(name).combine_chunks()) for name in names]
    for row in zip(*columns, strict=True) if columns else repeat((), table.num_rows):
        yield {name: value for name, value in zip(names, row, strict=True) if value is not None}


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(open_file(path) if is_url(path) else path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a trace file") from error
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path}: damaged or cut short ({error}); expected a whole Parquet file") from None


def _footer(file: pq.ParquetFile, path: str) -> Footer:
    encoded = (file.metadata.metadata or {}).get(FOOTER_KEY)
    if encoded is None:
        raise InputError(f"{path}: Parquet, but not of a trace; expected one that tracefile wrote")
    try:
        footer = msgspec.json.decode(encoded, type=Footer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {FOOTER_KEY.decode()}: {error}; expected a trace's description") from None
    if not footer.metas or footer.records != file.metadata.num_rows:
        raise InputError(f"{path}: {file.metadata.num_rows} rows; expected the {footer.records} that tracefile wrote")
    there, schema = file.schema_arrow, arrow_schema()
    for name in schema.names:
        if name in there.names and there.field(name).type != schema.field(name).type:
            raise InputError(f"{path}: {name}: {there.field(name).type}; expected {schema.field(name).type}")
    return footer


def _python_values(column: pa.Array) -> list[Any]:
    """Return a column as Python's values; NaN, which lines have not, is null."""
    if pa.types.is_map(column.type):
        return [None if items is None else dict(items) for items in column.to_pylist()]
    if pa.types.is_floating(column.type):
        return [None if value is None or math.isnan(value) else value for value in column.to_pylist()]
    return list(column.to_pylist())
