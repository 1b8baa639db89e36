"""Writing a trace in columns: row group by row group, under its name only once it is whole."""

import contextlib
import hashlib
import math
import os
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tracefile.parquet.arrowschema import FOOTER_KEY, HASHES, Footer, arrow_schema, field_types
from tracefile.records.encoding import encode_record, meta_object
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.storage.appending import begin_replacement

GROUP_ROWS = 1 << 14
GROUP_VALUES = 1 << 21
"""Hashes and gaps of a row group: what bounds a reader's memory where chains are long."""


class ColumnsWriter:
    """Writes records to a Parquet file, as ``TraceWriter`` does; a killed writer leaves no trace at all."""

    def __init__(self, path: str | os.PathLike[str], meta: Meta, *, overwrite: bool = False, mode: int = 0o666) -> None:
        self.path = os.fspath(path)
        self.count = 0
        self._new = begin_replacement(path, overwrite=overwrite, mode=mode)
        self._metas = [(0, meta)]
        self._digest = hashlib.sha256()
        self._records: list[Record] = []
        self._values = 0
        try:
            self._file = pq.ParquetWriter(self._new.aside, arrow_schema(), compression="zstd", compression_level=1)
        except OSError as error:
            self._new.abandon()
            raise self._no_room(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def write(self, record: Record) -> None:
        self._digest.update(encode_record(record))
        self._records.append(record)
        self.count += 1
        self._values += len(record.itl_ms) + sum(len(getattr(record, name) or ()) for name in HASHES)
        if len(self._records) >= GROUP_ROWS or self._values >= GROUP_VALUES:
            self._write_group()

    def change_meta(self, meta: Meta) -> None:
        if meta != self._metas[-1][1]:
            self._metas.append((self.count, meta))

    def close(self) -> None:
        """Write what is left and give the file its name."""
        if self._records:
            self._write_group()
        footer = Footer(
            records=self.count,
            digest=self._digest.hexdigest(),
            metas=[(row, meta_object(meta)) for row, meta in self._metas],
        )
        try:
            self._file.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(footer)})
            self._file.close()
            self._new.take_name()
        except OSError as error:
            self.abandon()
            raise self._no_room(error) from error

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._new.abandon()

    def _write_group(self) -> None:
        table = pa.Table.from_arrays(group_columns(self._records), schema=arrow_schema())
        try:
            self._file.write_table(table, row_group_size=len(self._records))
        except OSError as error:
            raise self._no_room(error) from error
        self._records, self._values = [], 0

    def _no_room(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: cannot write ({error.strerror or error}); expected room")


def group_columns(records: list[Record]) -> list[pa.Array]:
    """Return the columns of one row group, in the schema's order."""
    rest: list[dict[str, Any]] = [dict(record.extra) for record in records]
    columns = [_column(name, kind, records, rest) for name, kind in field_types().items()]
    return [*columns, pa.array([msgspec.json.encode(some).decode() if some else None for some in rest], pa.string())]


def _column(name: str, kind: pa.DataType, records: list[Record], rest: list[dict[str, Any]]) -> pa.Array:
    values = [getattr(record, name) for record in records]
    if kind == pa.float64():
        values = [value if value is None or math.isfinite(value) else None for value in values]
    if pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):  # numbers beyond 64 bits go to ``rest``
        for index, value in enumerate(values):
            if not _fits(value, kind):
                rest[index][name], values[index] = value, None
        return pa.array(values, kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (OverflowError, pa.ArrowInvalid):
        return False
    return True
