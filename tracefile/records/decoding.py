"""Decoding of a trace's lines, with errors that name the file, the line and the field."""

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from tracefile.records.encoding import split_unknown
from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA, Meta, Record

Struct = TypeVar("Struct", bound=msgspec.Struct)

_FIELD_IN_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<field>[^`]*)`)?$", re.DOTALL)
_MISSING_IN_MESSAGE = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


class RecordDecoder(Protocol):
    """Decoder of one format's lines."""

    @property
    def meta(self) -> Meta:
        """The trace's header, as far as the format has one."""

    @property
    def warnings(self) -> Sequence[str]:
        """Data lost or assumed; complete after the last line."""

    def decode(self, line: bytes, where: str) -> Record:
        """Return the line's record; ``where`` is ``file:line`` for the InputError."""


class KvtapeDecoder:
    """Our own schema. Lines with unknown fields take a slower path that keeps those in ``extra``."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self.warnings: Sequence[str] = ()
        self._decoder = msgspec.json.Decoder(Record)

    def decode(self, line: bytes, where: str) -> Record:
        try:
            record = self._decoder.decode(line)
        except msgspec.ValidationError:
            return convert_object(parse_object(line, where), Record, where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise not_json(line, where, error) from None
        if record.extra:  # the line itself had a field of that name, unknown to us
            return convert_object(parse_object(line, where), Record, where)
        return record


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The line's JSON object, untyped; raises InputError if it is none."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_json(line, where, error) from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: a JSON {type(found).__name__}; expected one object a line")
    return found


def not_json(line: bytes, where: str, error: Exception) -> InputError:
    """The error for a line that is no JSON; says so where a NaN or an infinity is the likely reason."""
    if b"NaN" in line or b"Infinity" in line:
        return InputError(f"{where}: NaN or Infinity ({error}); expected null for an unknown number")
    return InputError(f"{where}: not JSON ({error}); expected one object a line")


def is_object(line: bytes) -> bool:
    """Return whether the line is a whole JSON object; the torn beginning of one never is."""
    try:
        parse_object(line, "")
    except InputError:
        return False
    return True


def is_header(line: bytes) -> bool:
    """Return whether the line is a header, not a record: segments that were concatenated hold several."""
    if not line.startswith(b'{"meta"'):
        return False
    try:
        return "request_id" not in parse_object(line, "")
    except InputError:
        return False


def convert_object(found: dict[str, Any], struct: type[Struct], where: str) -> Struct:
    """The object as ``struct``, unknown keys kept in ``extra``; raises InputError naming ``where`` and the field."""
    try:
        return msgspec.convert(split_unknown(found, struct), struct)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_field_first(str(error))}") from None


def decode_meta(found: dict[str, Any], where: str) -> Meta:
    """The header of a kvtape trace; raises InputError on another schema version."""
    schema = found.get("schema")
    if schema != SCHEMA:
        raise InputError(f"{where}: meta.schema: {schema!r}; this version reads {SCHEMA!r}")
    return convert_object(found, Meta, f"{where}: meta")


def _field_first(message: str) -> str:
    """msgspec's message, rearranged as ``field: what is wrong``."""
    if missing := _MISSING_IN_MESSAGE.match(message):
        return f"{missing['field']}: missing; expected in every record"
    match = _FIELD_IN_MESSAGE.match(message)
    if match is None or not match["field"]:
        return message
    return f"{match['field']}: {match['what']}"
