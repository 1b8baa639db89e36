"""Encoding of records and headers as JSON lines; unknown fields of other writers come from ``extra``."""

from functools import cache
from typing import Any

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, HashInfo, Meta, Record, Workload

NESTED: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    Meta: {"hash": HashInfo, "engine": Engine, "workload": Workload},
}
"""Nested Structs with an ``extra`` field, by Struct and field."""

_encoder = msgspec.json.Encoder()


def encode_document(value: Any) -> bytes:
    """Encode a value as indented JSON with a newline; undecodable bytes of file names become ``?``."""
    return msgspec.json.format(encode_named(value), indent=2) + b"\n"


def encode_named(value: Any) -> bytes:
    """Encode a value with file names as JSON; undecodable bytes become ``?``."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_with_texts(msgspec.to_builtins(value)))


def _with_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_texts(key): _with_texts(each) for key, each in value.items()}
    return [_with_texts(each) for each in value] if isinstance(value, (list, tuple)) else value


@cache
def known_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of the JSON fields of a Struct, without ``extra``."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct)) - {"extra"}


def split_unknown(values: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Move the keys unknown to ``struct`` to ``extra``, in nested Structs too."""
    known = known_fields(struct)
    split = values.copy()
    if unknown := [key for key in values if key not in known]:
        split["extra"] = {key: split.pop(key) for key in unknown}
    for name, inner in NESTED.get(struct, {}).items():
        if isinstance(value := split.get(name), dict):
            split[name] = split_unknown(value, inner)
    return split


def merge_unknown(struct: msgspec.Struct) -> dict[str, Any]:
    """Merge known fields and ``extra`` into a JSON object; raises InputError if a name is in both."""
    merged: dict[str, Any] = msgspec.to_builtins(struct)
    extra: dict[str, Any] = merged.pop("extra", {})
    if clash := extra.keys() & known_fields(type(struct)):
        raise InputError(f"extra.{min(clash)}: a known field's name; expected it in the field itself")
    for name in NESTED.get(type(struct), {}):
        if name in merged:
            merged[name] = merge_unknown(getattr(struct, name))
    return merged | extra


def encode_record(record: Record) -> bytes:
    """Encode a record as a line, NaN and infinities as null; raises InputError like ``merge_unknown``."""
    if record.extra:
        return _encoder.encode(merge_unknown(record)) + b"\n"
    return _encoder.encode(record) + b"\n"


def encode_meta(meta: Meta) -> bytes:
    """Encode a header as a line."""
    return _encoder.encode({"meta": meta_object(meta)}) + b"\n"


def meta_object(meta: Meta) -> dict[str, Any]:
    """Return the header as a JSON object, always with its schema: readers detect the format by it."""
    return {"schema": meta.schema, **merge_unknown(meta)}
