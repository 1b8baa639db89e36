"""The Arrow schema of a trace in columns, derived from the record's fields."""

from functools import cache

import pyarrow as pa
from msgspec import inspect

from tracefile.parquet.layout import REST
from tracefile.records.schema import Record

HASHES = ("block_hashes", "output_block_hashes")
CHAIN_COLUMNS = {
    "prompt_blocks": pa.int32(),
    "output_blocks": pa.int32(),
    "prefix_row": pa.int32(),
    "prefix_blocks": pa.int32(),
    "new_hashes": pa.list_(pa.uint64()),
}
"""How many of the chain's hashes are the prompt's and the answer's, null where there is no such list; and the chain."""
UNSIGNED = {"branch_hash"}
"""Numbers of 64 bits without a sign."""


@cache
def field_types() -> dict[str, pa.DataType]:
    """Arrow's type of each field that is a column as it stands."""
    found = inspect.type_info(Record)
    assert isinstance(found, inspect.StructType)
    kinds = {field.name: _arrow_type(field.type) for field in found.fields if field.name not in (*HASHES, "extra")}
    return kinds | dict.fromkeys(UNSIGNED, pa.uint64())


@cache
def allowed_words() -> dict[str, frozenset[str]]:
    """The fields that take certain words only."""
    found = inspect.type_info(Record)
    assert isinstance(found, inspect.StructType)
    kinds = ((field.name, _known_type(field.type)) for field in found.fields)
    return {name: frozenset(map(str, kind.values)) for name, kind in kinds if isinstance(kind, inspect.LiteralType)}


@cache
def arrow_schema() -> pa.Schema:
    """The columns of a file, in order."""
    return pa.schema([*field_types().items(), *CHAIN_COLUMNS.items(), (REST, pa.string())])


def _known_type(kind: inspect.Type) -> inspect.Type:
    """``kind`` without its null."""
    if isinstance(kind, inspect.UnionType):
        (kind,) = (one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind


def _arrow_type(kind: inspect.Type) -> pa.DataType:
    kind = _known_type(kind)
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
