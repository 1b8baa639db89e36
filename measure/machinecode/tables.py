"""numba's view of a table of arguments: a type whose values are addresses of words, and whose fields are read there.

Kernels pass one address on, where a named tuple of arrays would be hundreds of numbers at each call.
"""

import hashlib
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.types import BaseTuple  # type: ignore[attr-defined]
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, register_model
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype

from measure.machinecode.arguments import ALIGNED, ARRAY_WORDS, WRITEABLE

_WORD = ir.IntType(64)


class Table(types.Type):
    """Fields in words, one after another."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.places = {}
        self.num_words = 0
        for field, one in fields.items():
            self.places[field] = self.num_words
            self.num_words += words_of(one)
        told = "".join(f"{field}:{one}" for field, one in fields.items())
        super().__init__(f"{name}.{hashlib.sha256(told.encode()).hexdigest()[:8]}")


def words_of(one: Any) -> int:
    """Return the words that a value of a type takes."""
    if isinstance(one, Table):
        return one.num_words
    return ARRAY_WORDS if isinstance(one, types.Array) else 1


def type_of(kind: Any) -> Any:
    """Return numba's type of an argument's kind (``measure.machinecode.arguments``)."""
    if isinstance(kind, type):
        return {int: types.int64, float: types.float64, bool: types.boolean}[kind]
    if not isinstance(kind, tuple):
        return from_dtype(kind)
    if isinstance(kind[0], type):
        names = getattr(kind[0], "_fields", None) or [f"field{number}" for number in range(len(kind[1]))]
        return Table(kind[0].__name__, dict(zip(names, map(type_of, kind[1]), strict=True)))
    dtype, dimensions, flags = kind
    readonly, aligned = not flags & WRITEABLE, bool(flags & ALIGNED)
    return types.Array(from_dtype(dtype), dimensions, "C", readonly=readonly, aligned=aligned)


@register_model(Table)
class _TableModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, table: Table) -> None:
        super().__init__(manager, table, _WORD.as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Table

    def generic_resolve(self, table: Table, field: str) -> Any:
        return table.fields.get(field)


@lower_getattr_generic(Table)  # type: ignore[untyped-decorator]
def _read_field(context: Any, builder: Any, table: Table, words: Any, field: str) -> Any:
    return _read(context, builder, table.fields[field], builder.gep(words, [_WORD(table.places[field])]))


@intrinsic  # type: ignore[untyped-decorator]
def fields_of(_: Any, table: Any) -> Any:
    """Return a table's fields as a tuple."""
    made = BaseTuple.from_types(list(table.fields.values()))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parts = [_read_field(context, builder, table, arguments[0], field) for field in table.fields]
        return context.make_tuple(builder, made, parts)

    return made(table), generate


def _read(context: Any, builder: Any, made: Any, words: Any) -> Any:
    """Generate code that reads a value of type ``made`` at ``words``."""
    if isinstance(made, Table):
        return words
    if isinstance(made, types.Array):
        return _read_array(context, builder, made, words)
    word, data = _word(builder, words, 0), context.get_value_type(made)
    if made == types.boolean:
        return builder.icmp_signed("!=", word, _WORD(0))
    if isinstance(data, ir.IntType):
        return word if data.width == _WORD.width else builder.trunc(word, data)
    return builder.bitcast(word, data)


def _read_array(context: Any, builder: Any, made: Any, words: Any) -> Any:
    address, length, width = (_word(builder, words, place) for place in range(ARRAY_WORDS))
    array = make_array(made)(context, builder)
    size = cgutils.intp_t(context.get_abi_sizeof(context.get_data_type(made.dtype)))
    lengths, strides = ([length], [size]) if made.ndim == 1 else ([length, width], [builder.mul(width, size), size])
    data = builder.inttoptr(address, array.data.type)
    populate_array(array, data=data, shape=lengths, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


def _word(builder: Any, words: Any, place: int) -> Any:
    """Read a word; nothing writes into a table while it is in use, so LLVM reads each once."""
    found = builder.load(builder.gep(words, [_WORD(place)]))
    found.set_metadata("invariant.load", builder.module.add_metadata([]))
    return found
