"""The Arrow schema of a trace in columns, derived from the record's fields, and the file's footer.

Every field of a record is a column of its name. ``rest`` is a JSON object of everything without a column: unknown
fields and numbers beyond 64 bits. Readers and writers hold a row group at a time.
"""

from functools import cache
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect

from tracefile.records.schema import SCHEMA, Record

FOOTER_KEY = b"kvtape"
REST = "rest"
"""Column for the fields without a column; null: none."""

HASHES = ("block_hashes", "output_block_hashes")
UNSIGNED = {
    "branch_hash": pa.uint64(),
    "block_hashes": pa.list_(pa.uint64()),
    "output_block_hashes": pa.list_(pa.uint64()),
}
"""Numbers of 64 bits without a sign."""


class Footer(msgspec.Struct, kw_only=True):
    """The file's key-value metadata under ``kvtape``."""

    schema: str = SCHEMA
    records: int
    """Rows written. Another number of rows means that another tool wrote the file."""
    digest: str
    """``trace_digest`` of the same records as JSON Lines."""
    metas: list[tuple[int, dict[str, Any]]]
    """Each header, and how many rows come before it."""


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
