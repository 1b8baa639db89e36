"""Rows of a dataset with their position: lines of JSON Lines, or items of one JSON array."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError
from tracefile.storage.lines import LineReader

T = TypeVar("T")


def rows(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield rows as JSON text with their position: ``file:line``, or ``file: item 3`` of a single array."""
    with LineReader(path, expected="a dataset") as lines:
        stat = path.stat()
        items = _array_items(path, stat.st_mtime_ns, stat.st_size)
        if items is None:
            for line in lines:
                yield f"{path}:{lines.number}", line
            return
    for number, item in enumerate(items, start=1):
        yield f"{path}: item {number}", bytes(item)


def decode(row: bytes, kind: type[T], where: str, expected: str) -> T:
    """Row as ``kind``. Raises InputError with position, field and expectation."""
    try:
        return msgspec.json.decode(row, type=kind)
    except NOT_JSON as error:
        raise InputError(f"{where}: {_field_first(str(error))}; expected {expected}") from None


def convert(value: Any, kind: type[T], where: str, expected: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_field_first(str(error))}; expected {expected}") from None


def _is_row(line: bytes) -> bool:
    """True if a line is an object or an array of messages, not the file's only array; a large line is not decoded."""
    try:
        if not line.lstrip().startswith(b"["):
            msgspec.json.decode(line, type=msgspec.Raw)
            return True
        first, *_ = msgspec.json.decode(line, type=list[msgspec.Raw]) or [msgspec.Raw(b"null")]
        message = msgspec.json.decode(first)
    except NOT_JSON:
        return False
    return isinstance(message, dict) and "role" in message


@lru_cache(maxsize=1)
def _array_items(path: Path, mtime_ns: int, size: int) -> Sequence[msgspec.Raw] | None:
    """Items of a file that is one array or one row; null: a row a line. Cached for repeated passes."""
    del mtime_ns, size  # part of the cache key: a changed file is read again
    with LineReader(path, expected="a dataset") as lines:
        first = next(lines, None)
        if first is None:
            raise InputError(f"{path}: empty; expected a dataset")
        if _is_row(first):
            return None
        content = b"\n".join([first, *lines])
    if not content.lstrip().startswith(b"["):
        return [msgspec.Raw(content)]
    try:
        return msgspec.json.decode(content, type=list[msgspec.Raw])
    except NOT_JSON as error:
        raise InputError(f"{path}: not JSON ({error}); expected one array, or one object a line") from None


def _field_first(message: str) -> str:
    """msgspec's message with the field first."""
    problem, _, field = message.partition(" - at `$")
    return f"{field.rstrip('`').lstrip('.')}: {problem}" if field else problem
