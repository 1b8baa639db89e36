"""Unknown fields pass through: what a newer or another writer said is kept in ``extra`` and written back."""

from functools import cache
from typing import Any

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, HashInfo, Meta, Workload

NESTED: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    Meta: {"hash": HashInfo, "engine": Engine, "workload": Workload},
}
"""Which fields of a Struct are Structs with an ``extra`` of their own."""


@cache
def known_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    """The names a Struct reads from JSON; ``extra`` is not one: it is where the others go."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct)) - {"extra"}


def split_unknown(found: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON object with the keys that ``struct`` does not know moved to ``extra``, in its nested Structs too."""
    known = known_fields(struct)
    split = {key: value for key, value in found.items() if key in known}
    if len(split) < len(found):
        split["extra"] = {key: value for key, value in found.items() if key not in known}
    for name, inner in NESTED.get(struct, {}).items():
        if isinstance(value := split.get(name), dict):
            split[name] = split_unknown(value, inner)
    return split


def merge_unknown(struct: msgspec.Struct) -> dict[str, Any]:
    """The JSON object to write: known fields that are set, then the unknown ones of ``extra`` at the same level.

    Raises InputError if ``extra`` holds a known field's name: it would be read back as that field.
    """
    merged: dict[str, Any] = msgspec.to_builtins(struct)
    extra: dict[str, Any] = merged.pop("extra", {})
    if clash := extra.keys() & known_fields(type(struct)):
        raise InputError(f"extra.{min(clash)}: a known field's name; expected it in the field itself")
    for name in NESTED.get(type(struct), {}):
        if name in merged:
            merged[name] = merge_unknown(getattr(struct, name))
    return merged | extra
