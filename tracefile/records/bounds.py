"""Values that a record may have: beyond them, a count or a time was misread, and readers take it as unknown."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect

from tracefile.records.schema import Record


class Bounds(NamedTuple):
    """Least and greatest value of a field, or of each entry of a list."""

    least: float
    most: float
    is_list: bool

    def fault(self, value: Any) -> str | None:
        """Return the first value that is out of bounds, and what was expected; None: there is none."""
        for one in value if self.is_list and isinstance(value, list) else (value,):
            is_number = isinstance(one, (int, float)) and not isinstance(one, bool)
            if is_number and not self.least <= one <= self.most:
                limit = f"{self.least:g} or more" if one < self.least else f"at most {self.most:.10g}"
                return f"{one}; expected {limit}"
        return None


@cache
def record_bounds() -> dict[str, Bounds]:
    """Bounds of the fields that have some, as the schema gives them."""
    found = inspect.type_info(Record)
    assert isinstance(found, inspect.StructType)
    bounds = {}
    for field in found.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for kind in kinds:
            one = kind.item_type if isinstance(kind, inspect.ListType) else kind
            if isinstance(one, (inspect.IntType, inspect.FloatType)) and one.ge is not None and one.le is not None:
                bounds[field.name] = Bounds(one.ge, one.le, isinstance(kind, inspect.ListType))
    return bounds


def out_of_bounds(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the faults of a record's fields, by name."""
    faults = ((name, bounds.fault(found[name])) for name, bounds in record_bounds().items() if name in found)
    return {name: fault for name, fault in faults if fault is not None}
