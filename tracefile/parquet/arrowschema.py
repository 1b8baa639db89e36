"""The Arrow schema of a trace in columns, derived from the record's fields."""

from functools import cache

import pyarrow as pa
from msgspec import inspect

from tracefile.parquet.layout import REST
from tracefile.records.schema import Record

HASHES = ("block_hashes", "output_block_hashes")
UNSIGNED = {
    "branch_hash": pa.uint64(),
    "block_hashes": pa.list_(pa.uint64()),
    "output_block_hashes": pa.list_(pa.uint64()),
}
"""Numbers of 64 bits without a sign."""


@cache
def field_types() -> dict[str, pa.DataType]:
    """Return Arrow's type of each field that is a column."""
    info = inspect.type_info(Record)
    assert isinstance(info, inspect.StructType)
    kinds = {field.name: _arrow_type(field.type) for field in info.fields if field.name != "extra"}
    return kinds | UNSIGNED


@cache
def arrow_schema() -> pa.Schema:
    """Return the columns of a file, in order."""
    return pa.schema([*field_types().items(), (REST, pa.string())])


def _arrow_type(kind: inspect.Type) -> pa.DataType:
    if isinstance(kind, inspect.UnionType):  # with null
        (kind,) = (one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.ListType):
        return pa.list_(_arrow_type(kind.item_type))
    if isinstance(kind, inspect.DictType):
        return pa.map_(_arrow_type(kind.key_type), _arrow_type(kind.value_type))
    simple: dict[type[inspect.Type], pa.DataType] = {
        inspect.FloatType: pa.float64(),
        inspect.IntType: pa.int64(),
        inspect.BoolType: pa.bool_(),
        inspect.StrType: pa.string(),
        inspect.LiteralType: pa.string(),
    }
    return simple[type(kind)]
