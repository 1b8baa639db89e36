"""A trace as a Parquet file for other tools: every field of a record is a column of its name, null where it is absent.

``rest`` is a JSON object of what has no column: unknown fields, and numbers beyond 64 bits. Commands read lines.
"""

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra
from tracefile.records.schema import Record
from tracefile.storage.appending import begin_replacement
from tracefile.storage.output import mode_like, refuse_inputs

GROUP_ROWS = 1 << 14
UNSIGNED = ("block_hashes", "output_block_hashes", "branch_hash")
"""Numbers of 64 bits without a sign."""


def write_columns(
    path: str, records: Iterable[Record], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> int:
    """Write records in columns, complete or not at all; return their number. Raises InputError."""
    pa, pq = (load_extra(name, where=f"{path}: Parquet ") for name in ("pyarrow", "pyarrow.parquet"))
    refuse_inputs(path, inputs)
    new, kinds, rows = begin_replacement(path, overwrite=overwrite, mode=mode_like(inputs)), column_types(pa), 0
    schema = pa.schema([*kinds.items(), ("rest", pa.string())])
    try:
        with pq.ParquetWriter(new.aside, schema, compression="zstd") as file:
            for group in _groups(records):
                file.write_table(pa.Table.from_arrays(group_columns(pa, kinds, group), schema=schema))
                rows += len(group)
        new.take_name()
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror or error}); expected room") from error
    finally:
        new.abandon()
    return rows


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    left = iter(records)
    while group := list(islice(left, GROUP_ROWS)):
        yield group


def column_types(pa: Any) -> dict[str, Any]:
    """Return Arrow's type of each field that is a column."""
    info = inspect.type_info(Record)
    assert isinstance(info, inspect.StructType)
    return {field.name: _arrow_type(pa, field.name, field.type) for field in info.fields if field.name != "extra"}


def _arrow_type(pa: Any, name: str, kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.UnionType):  # with null
        (kind,) = (one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.ListType):
        return pa.list_(_arrow_type(pa, name, kind.item_type))
    if isinstance(kind, inspect.DictType):
        return pa.map_(pa.string(), pa.string())
    if isinstance(kind, inspect.IntType):
        return pa.uint64() if name in UNSIGNED else pa.int64()
    simple = {inspect.FloatType: pa.float64(), inspect.BoolType: pa.bool_()}
    return simple.get(type(kind), pa.string())


def group_columns(pa: Any, kinds: dict[str, Any], records: list[Record]) -> list[Any]:
    """Return the columns of some records, in the schema's order."""
    rest: list[dict[str, Any]] = [dict(record.extra) for record in records]
    columns = [_column(pa, name, kind, records, rest) for name, kind in kinds.items()]
    return [*columns, pa.array([msgspec.json.encode(some).decode() if some else None for some in rest], pa.string())]


def _column(pa: Any, name: str, kind: Any, records: list[Record], rest: list[dict[str, Any]]) -> Any:
    values = [getattr(record, name) for record in records]
    if pa.types.is_floating(kind):
        values = [value if value is None or math.isfinite(value) else None for value in values]
    if pa.types.is_map(kind):
        values = [None if value is None else list(value.items()) for value in values]
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):
        for index, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (OverflowError, pa.ArrowInvalid):  # a number beyond 64 bits
                rest[index][name], values[index] = value, None
        return pa.array(values, kind)
