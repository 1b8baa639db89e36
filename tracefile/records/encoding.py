"""Records and headers as JSON: a line each, with the unknown fields of newer or other writers kept in ``extra``."""

from functools import cache
from typing import Any

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, HashInfo, Meta, Record, Workload

NESTED: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    Meta: {"hash": HashInfo, "engine": Engine, "workload": Workload},
}
"""Fields of a Struct that are Structs with an ``extra`` of their own."""

_encoder = msgspec.json.Encoder()


def encode_document(value: Any) -> bytes:
    """Return a value as JSON, indented, with a newline; bytes of file names that are no text become ``?``."""
    return msgspec.json.format(encode_named(value), indent=2) + b"\n"


def encode_named(value: Any) -> bytes:
    """Return a value with names of files as JSON; their bytes that are no text become ``?``."""
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
    """Names of the JSON fields of a Struct, without ``extra``."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct)) - {"extra"}


def split_unknown(found: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON object with the keys unknown to ``struct`` moved to ``extra``, in nested Structs too."""
    known = known_fields(struct)
    split = found.copy()
    if unknown := [key for key in found if key not in known]:
        split["extra"] = {key: split.pop(key) for key in unknown}
    for name, inner in NESTED.get(struct, {}).items():
        if isinstance(value := split.get(name), dict):
            split[name] = split_unknown(value, inner)
    return split


def merge_unknown(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the JSON object with known fields set and those of ``extra``; raises InputError if a name is in both."""
    merged: dict[str, Any] = msgspec.to_builtins(struct)
    extra: dict[str, Any] = merged.pop("extra", {})
    if clash := extra.keys() & known_fields(type(struct)):
        raise InputError(f"extra.{min(clash)}: a known field's name; expected it in the field itself")
    for name in NESTED.get(type(struct), {}):
        if name in merged:
            merged[name] = merge_unknown(getattr(struct, name))
    return merged | extra


def encode_record(record: Record) -> bytes:
    """Return the record's line with its end, NaN and infinities as null; raises InputError like ``merge_unknown``."""
    if record.extra:
        return _encoder.encode(merge_unknown(record)) + b"\n"
    return _encoder.encode(record) + b"\n"


def encode_meta(meta: Meta) -> bytes:
    """Return the header line, its line end included."""
    return _encoder.encode({"meta": meta_object(meta)}) + b"\n"


def meta_object(meta: Meta) -> dict[str, Any]:
    """Return the header as JSON, always with its schema: readers recognise the format by it."""
    return {"schema": meta.schema, **merge_unknown(meta)}
