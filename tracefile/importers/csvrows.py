"""Rows of a published CSV file by the names in its header, with errors that name the line and the column."""

import csv
import math
from collections.abc import Collection, Mapping

from tracefile.records.errors import InputError

Row = Mapping[str, str]


def header_of(line: bytes) -> list[str]:
    """The column names of a first line."""
    return [name.strip() for name in _cells(line.removeprefix(b"\xef\xbb\xbf"))]


def has_columns(line: bytes, columns: Collection[str]) -> bool:
    """Return whether a first line is a header with all of these columns."""
    return set(columns) <= set(header_of(line))


def row_of(header: list[str], line: bytes, where: str) -> Row:
    """Split a line by column; raises InputError if it has not as many cells as the header."""
    cells = _cells(line)
    if len(cells) != len(header):
        raise InputError(f"{where}: {len(cells)} cells; expected {len(header)}: {', '.join(header)}")
    return dict(zip(header, (cell.strip() for cell in cells), strict=True))


def number_of(row: Row, column: str, where: str) -> float:
    """A cell of 0 or more; raises InputError."""
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: {column}: {row[column]!r}; expected a number of 0 or more")
    return value


def count_of(row: Row, column: str, where: str) -> int:
    """A whole cell of 0 or more; raises InputError."""
    value = number_of(row, column, where)
    if value % 1:
        raise InputError(f"{where}: {column}: {row[column]!r}; expected a whole number")
    return int(value)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace")]), [])
