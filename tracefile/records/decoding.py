"""Decoding of trace lines into records, with errors that name file, line and field."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from tracefile.records.encoding import split_unknown
from tracefile.records.errors import InputError
from tracefile.records.schema import MAX_REPORTED, MOST_TOKENS, SCHEMA, Engine, Meta, Record, RequestId

HEADER_START = b'{"meta"'

Struct = TypeVar("Struct", bound=msgspec.Struct)

_FIELD_IN_MESSAGE = re.compile(r"^(?P<problem>.*?)(?: - at `\$\.?(?P<field>[^`]*)`)?$", re.DOTALL)
_BOUND_IN_MESSAGE = re.compile(r"^Expected `\w+` (?P<sign>[<>]=) (?P<bound>\S+) - at `\$\.(?P<field>\w+)")
_MISSING_IN_MESSAGE = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


class OutOfBoundsError(InputError):
    """Values of a record are out of bounds; ``record`` is the record without these values."""

    def __init__(self, where: str, record: Record, faults: Mapping[str, str]) -> None:
        super().__init__(f"{where}: " + "; ".join(f"{name}: {problem}" for name, problem in faults.items()))
        self.record = record
        self.faults = faults
        """Value and expectation by field."""


class RecordColumns:
    """Records as columns; a record is created on access, and fields without a column are null.

    ``extra_name``: key in ``Record.extra`` of the values in column ``extra``; None: the record has no such key.
    """

    def __init__(self, columns: dict[str, list[Any]], extra_name: str = "") -> None:
        self.columns, self.extra_name = columns, extra_name

    def __len__(self) -> int:
        return len(self.columns["request_id"])

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))

    def record(self, index: int) -> Record:
        fields = {name: column[index] for name, column in self.columns.items()}
        if "extra" in fields:
            fields["extra"] = {} if fields["extra"] is None else {self.extra_name: fields["extra"]}
        return Record(**fields)

    def column(self, name: str) -> list[Any]:
        return self.columns.get(name) or [getattr(_EMPTY_RECORD, name)] * len(self)


def joined_records(parts: Sequence[list[Record] | RecordColumns]) -> list[Record] | RecordColumns:
    """Concatenate records, as columns if all parts are columns."""
    columns = [part for part in parts if isinstance(part, RecordColumns)]
    if not columns or len(columns) < len(parts):
        return [record for part in parts for record in part]
    joined = {name: [value for part in columns for value in part.columns[name]] for name in columns[0].columns}
    return RecordColumns(joined, columns[0].extra_name)


def without_times(records: list[Record] | RecordColumns) -> list[Record] | RecordColumns:
    """Drop the token times of records with ``output_tokens``: token times take most of the memory."""
    for record in records if isinstance(records, list) else ():
        if record.itl_ms and record.output_tokens:
            record.itl_ms, record.itl_tokens = [], []
    return records


_EMPTY_RECORD = Record(request_id=RequestId(""))


class LineDecoder(Protocol):
    """Decoder of a trace format."""

    meta: Meta
    """Header of the trace, with the fields that the format has."""

    def decode(self, line: bytes, where: str) -> Record:
        """Return the record of a line; ``where``: ``file:line`` for the InputError."""

    def decode_block(self, lines: list[bytes]) -> list[Record] | RecordColumns | None:
        """Return the records of many lines, several times as fast; None: a line is no valid record."""


class KvtapeDecoder:
    """Decoder of kvtape traces. Lines with unknown fields take a slower path that stores these in ``extra``."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self._decoder = msgspec.json.Decoder(Record)
        self._has_unknown = False
        """The latest line had unknown fields, and the next line is assumed to have some."""

    def decode(self, line: bytes, where: str) -> Record:
        if self._has_unknown:
            return self._convert(line, where)
        try:
            record = self._decoder.decode(line)
        except msgspec.ValidationError:
            return self._convert(line, where)
        except NOT_JSON as error:
            raise not_json(line, where, error) from None
        if record.extra:  # the line has a field named extra, which is unknown
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
        """Return the record of a line, without values that are out of bounds."""
        try:
            return self.decode(line, where)
        except OutOfBoundsError as error:
            return error.record


def convert_record(fields: dict[str, Any], where: str) -> Record:
    """Convert a JSON object to a record; raises OutOfBoundsError or InputError."""
    faults: dict[str, str] = {}
    while True:
        try:
            record = msgspec.convert(split_unknown(fields, Record), Record)
            break
        except msgspec.ValidationError as error:
            bound_match = _BOUND_IN_MESSAGE.match(str(error))
            if bound_match is None:
                raise InputError(f"{where}: {_field_first(str(error))}") from None
            name = bound_match["field"]
            value = "a value" if isinstance(fields[name], list) else fields[name]
            faults[name] = f"{value}; expected {bound_match['sign']} {bound_match['bound']}"
            fields = {key: value for key, value in fields.items() if key != name}
    if faults:
        raise OutOfBoundsError(where, record, faults)
    return record


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def first_value(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value that is not null under ``names``; None: all are null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line into a JSON object; raises InputError for anything else."""
    try:
        value = msgspec.json.decode(line)
    except NOT_JSON as error:
        raise not_json(line, where, error) from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON {type(value).__name__}; expected one object a line")
    return value


def not_json(line: bytes, where: str, error: Exception) -> InputError:
    """Return the error for a line that is not JSON; names NaN and Infinity as the likely cause."""
    if isinstance(error, RecursionError):
        return InputError(f"{where}: JSON nested too deeply; expected a trace's line")
    if b"NaN" in line or b"Infinity" in line:
        return InputError(f"{where}: NaN or Infinity ({error}); expected null for an unknown number")
    return InputError(f"{where}: not JSON ({error}); expected one object a line")


def is_object(line: bytes) -> bool:
    """Return whether a line is a complete JSON object; a torn line never is."""
    try:
        parse_object(line, "")
    except InputError:
        return False
    return True


def is_header(line: bytes) -> bool:
    """Return whether a line is a header; concatenated segments have several headers."""
    if not line.startswith(HEADER_START):
        return False
    try:
        return "request_id" not in parse_object(line, "")
    except InputError:
        return False


def convert_object(fields: dict[str, Any], struct: type[Struct], where: str) -> Struct:
    """Convert an object to ``struct`` with unknown keys in ``extra``; raises InputError with ``where``, field."""
    try:
        return msgspec.convert(split_unknown(fields, struct), struct)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_field_first(str(error))}") from None


def decode_meta(value: Any, where: str) -> Meta:
    """Decode the header of a kvtape trace; raises InputError for another schema version."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{where}: meta.schema: {schema!r}; this version reads {SCHEMA!r}")
    return checked_meta(convert_object(value, Meta, f"{where}: meta"), where)


def checked_meta(meta: Meta, where: str) -> Meta:
    """Validate the sizes in a header; raises InputError for impossible sizes."""
    if meta.block_size is not None and not 1 <= meta.block_size <= MOST_TOKENS:
        raise InputError(f"{where}: meta.block_size: {meta.block_size}; expected 1 to {MOST_TOKENS:,}")
    engine = meta.engine or Engine()
    for name in ("block_size", "num_gpu_blocks", "max_model_len"):
        value = getattr(engine, name)
        if value is not None and not 0 <= value <= MAX_REPORTED:
            raise InputError(f"{where}: meta.engine.{name}: {value}; expected 0 to {MAX_REPORTED:,}")
    return meta


def _field_first(message: str) -> str:
    """Rearrange a message of msgspec as ``field: problem``."""
    if missing := _MISSING_IN_MESSAGE.match(message):
        return f"{missing['field']}: missing; expected in every record"
    match = _FIELD_IN_MESSAGE.match(message)
    if match is None or not match["field"]:
        return message
    return f"{match['field']}: {match['problem']}"
