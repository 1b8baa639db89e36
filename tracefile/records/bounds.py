"""Values that a record may have: beyond them, a count or a time was misread, and readers take it as unknown."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect

from tracefile.records.schema import Record


class Bounds(NamedTuple):
    """Least and greatest value of a field."""

    least: float
    most: float

    def fault(self, value: Any) -> str | None:
        """Return the value and what was expected, if it is a number out of bounds; else None."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or self.least <= value <= self.most:
            return None
        limit = f"{self.least:g} or more" if value < self.least else f"at most {self.most:.10g}"
        return f"{value}; expected {limit}"


@cache
def record_bounds() -> dict[str, Bounds]:
    """Bounds of the fields that have some, as the schema gives them."""
    found = inspect.type_info(Record)
    assert isinstance(found, inspect.StructType)
    bounds = {}
    for field in found.fields:
        for kind in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            if isinstance(kind, (inspect.IntType, inspect.FloatType)) and kind.ge is not None and kind.le is not None:
                bounds[field.name] = Bounds(kind.ge, kind.le)
    return bounds


def out_of_bounds(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the faults of a record's fields, by name."""
    faults = ((name, bounds.fault(found[name])) for name, bounds in record_bounds().items() if name in found)
    return {name: fault for name, fault in faults if fault is not None}
