"""Decoding of a trace's lines, with errors that name the file, the line and the field."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from tracefile.records.encoding import split_unknown
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, MOST_TOLD, SCHEMA, Engine, Meta, Record, RequestId

HEADER_START = b'{"meta"'

Struct = TypeVar("Struct", bound=msgspec.Struct)

_FIELD_IN_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<field>[^`]*)`)?$", re.DOTALL)
_BOUND_IN_MESSAGE = re.compile(r"^Expected `\w+` (?P<sign>[<>]=) (?P<bound>\S+) - at `\$\.(?P<field>\w+)")
_MISSING_IN_MESSAGE = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


class OutOfBoundsError(InputError):
    """A record with values out of bounds, which were misread, and the record without them."""

    def __init__(self, where: str, record: Record, faults: Mapping[str, str]) -> None:
        super().__init__(f"{where}: " + "; ".join(f"{name}: {what}" for name, what in faults.items()))
        self.record = record
        self.faults = faults
        """By field: the value, and what was expected."""


class RecordColumns:
    """Records of several lines by field, each made when it is asked for; fields without a column are not known.

    ``extra_name``: name in ``Record.extra`` of the values of column ``extra``, None for records without one.
    """

    def __init__(self, columns: dict[str, list[Any]], extra_name: str = "") -> None:
        self.columns, self.extra_name = columns, extra_name

    def __len__(self) -> int:
        return len(self.columns["request_id"])

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))

    def record(self, index: int) -> Record:
        known = {name: column[index] for name, column in self.columns.items()}
        if "extra" in known:
            known["extra"] = {} if known["extra"] is None else {self.extra_name: known["extra"]}
        return Record(**known)

    def column(self, name: str) -> list[Any]:
        return self.columns.get(name) or [getattr(NOTHING_KNOWN, name)] * len(self)


def joined_records(parts: Sequence[list[Record] | RecordColumns]) -> list[Record] | RecordColumns:
    """Return the records of all parts, as columns if all parts are."""
    columns = [part for part in parts if isinstance(part, RecordColumns)]
    if not columns or len(columns) < len(parts):
        return [record for part in parts for record in part]
    joined = {name: [value for part in columns for value in part.columns[name]] for name in columns[0].columns}
    return RecordColumns(joined, columns[0].extra_name)


def without_times(records: list[Record] | RecordColumns) -> list[Record] | RecordColumns:
    """Drop the times of tokens that a record counts, too: they take most of the memory."""
    for record in records if isinstance(records, list) else ():
        if record.itl_ms and record.output_tokens:
            record.itl_ms, record.itl_tokens = [], []
    return records


NOTHING_KNOWN = Record(request_id=RequestId(""))


class LineDecoder(Protocol):
    """Decoder of one format's lines."""

    meta: Meta
    """The trace's header, as far as the format has one."""

    def decode(self, line: bytes, where: str) -> Record:
        """Return the line's record; ``where`` is ``file:line`` for the InputError."""

    def decode_block(self, lines: list[bytes]) -> list[Record] | RecordColumns | None:
        """Return a record for each line, several times as fast; null: not all are records without faults."""


class KvtapeDecoder:
    """Our own schema. Lines with unknown fields take a slower path that keeps those in ``extra``."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self._decoder = msgspec.json.Decoder(Record)
        self._has_unknown = False
        """The latest line had unknown fields, and the next is taken to have some."""

    def decode(self, line: bytes, where: str) -> Record:
        if self._has_unknown:
            return self._convert(line, where)
        try:
            record = self._decoder.decode(line)
        except msgspec.ValidationError:
            return self._convert(line, where)
        except NOT_JSON as error:
            raise not_json(line, where, error) from None
        if record.extra:  # the line itself had a field of that name, unknown to us
            return self._convert(line, where)
        return record

    def _convert(self, line: bytes, where: str) -> Record:
        record = convert_record(parse_object(line, where), where)
        self._has_unknown = bool(record.extra)
        return record

    def decode_block(self, lines: list[bytes]) -> list[Record] | None:
        if self._has_unknown:
            return None
        try:
            records = list(map(self._decoder.decode, lines))
        except NOT_JSON:
            return None
        return None if any(record.extra for record in records) else records

    def decode_without_faults(self, line: bytes, where: str) -> Record:
        """Return the line's record, without values that are out of bounds."""
        try:
            return self.decode(line, where)
        except OutOfBoundsError as error:
            return error.record


def convert_record(fields: dict[str, Any], where: str) -> Record:
    """The object as a record; raises OutOfBoundsError if it has values out of bounds, InputError if it is none."""
    faults: dict[str, str] = {}
    while True:
        try:
            record = msgspec.convert(split_unknown(fields, Record), Record)
            break
        except msgspec.ValidationError as error:
            beyond = _BOUND_IN_MESSAGE.match(str(error))
            if beyond is None:
                raise InputError(f"{where}: {_field_first(str(error))}") from None
            name = beyond["field"]
            value = "a value" if isinstance(fields[name], list) else fields[name]
            faults[name] = f"{value}; expected {beyond['sign']} {beyond['bound']}"
            fields = {key: value for key, value in fields.items() if key != name}
    if faults:
        raise OutOfBoundsError(where, record, faults)
    return record


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def first_told(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these names that has one; None: none has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The line's JSON object, untyped; raises InputError if it is none."""
    try:
        value = msgspec.json.decode(line)
    except NOT_JSON as error:
        raise not_json(line, where, error) from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON {type(value).__name__}; expected one object a line")
    return value


def not_json(line: bytes, where: str, error: Exception) -> InputError:
    """The error for a line that is no JSON; says so where a NaN or an infinity is the likely reason."""
    if isinstance(error, RecursionError):
        return InputError(f"{where}: JSON nested too deeply; expected a trace's line")
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
    if not line.startswith(HEADER_START):
        return False
    try:
        return "request_id" not in parse_object(line, "")
    except InputError:
        return False


def convert_object(fields: dict[str, Any], struct: type[Struct], where: str) -> Struct:
    """The object as ``struct``, unknown keys kept in ``extra``; raises InputError naming ``where`` and the field."""
    try:
        return msgspec.convert(split_unknown(fields, struct), struct)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_field_first(str(error))}") from None


def decode_meta(value: Any, where: str) -> Meta:
    """The header of a kvtape trace; raises InputError on another schema version."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{where}: meta.schema: {schema!r}; this version reads {SCHEMA!r}")
    return checked_meta(convert_object(value, Meta, f"{where}: meta"), where)


def checked_meta(meta: Meta, where: str) -> Meta:
    """Return the header; raises InputError for sizes that no engine has."""
    if meta.block_size is not None and not 1 <= meta.block_size <= MOST_TOKENS:
        raise InputError(f"{where}: meta.block_size: {meta.block_size}; expected 1 to {MOST_TOKENS:,}")
    engine = meta.engine or Engine()
    for name in ("block_size", "num_gpu_blocks", "max_model_len"):
        value = getattr(engine, name)
        if value is not None and not 0 <= value <= MOST_TOLD:
            raise InputError(f"{where}: meta.engine.{name}: {value}; expected 0 to {MOST_TOLD:,}")
    return meta


def _field_first(message: str) -> str:
    """msgspec's message, rearranged as ``field: what is wrong``."""
    if missing := _MISSING_IN_MESSAGE.match(message):
        return f"{missing['field']}: missing; expected in every record"
    match = _FIELD_IN_MESSAGE.match(message)
    if match is None or not match["field"]:
        return message
    return f"{match['field']}: {match['what']}"
