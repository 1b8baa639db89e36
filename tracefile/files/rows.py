"""Rows of an index as JSON Lines, each with a name of its own: read with their places, written whole or not at all."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from tracefile.records.decoding import convert_object, parse_object
from tracefile.records.errors import InputError
from tracefile.storage.durable import replace_durably
from tracefile.storage.lines import LineReader

Row = TypeVar("Row", bound=msgspec.Struct)


def read_rows(path: Path, struct: type[Row], name: str) -> Iterator[tuple[Row, str]]:
    """Yield rows, each with its file and line. Raises InputError, also for a ``name`` that comes again."""
    lines_of: dict[str, int] = {}
    with LineReader(path) as lines:
        for line in lines:
            where = f"{path}:{lines.number}"
            row = convert_object(parse_object(line, where), struct, where)
            yield row, where  # its reader tells what is wrong with the row itself
            own = getattr(row, name)
            if earlier := lines_of.get(own):
                raise InputError(f"{where}: {name}: {own!r} is on line {earlier} too; expected a name of its own")
            lines_of[own] = lines.number


def write_rows(path: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Replace the file: readers see the old one or the new one, whatever ends the writer."""
    try:
        replace_durably(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror or error}); expected a writable folder") from error
