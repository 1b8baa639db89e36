"""A rate over time from a file: CSV with the columns t_s and rate, or JSON Lines of objects with both."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tracefile import InputError
from tracefile.storage.lines import LineReader

EXPECTED = "t_s and rate, both numbers of 0 or more, times in order"
COLUMNS = ("t_s", "rate")

RateSeries = tuple[tuple[float, float], ...]


class RatePoint(msgspec.Struct):
    """One line."""

    t_s: float
    rate: float


def read_rate_series(path: Path) -> RateSeries:
    """The points of a file; raises InputError naming the line."""
    points: list[tuple[float, float]] = []
    with LineReader(path) as lines:
        for where, found in _rows(path, lines):
            try:
                point = msgspec.convert(found, RatePoint, strict=False)
            except msgspec.ValidationError as error:
                raise InputError(f"{where}: {error}; expected {EXPECTED}") from None
            late = bool(points) and point.t_s <= points[-1][0]
            if not (0 <= point.t_s < math.inf and 0 <= point.rate < math.inf) or late:
                raise InputError(f"{where}: t_s {point.t_s:g}, rate {point.rate:g}; expected {EXPECTED}")
            points.append((point.t_s, point.rate))
    if not any(rate for _, rate in points):
        raise InputError(f"{path}: no rate above 0; expected {EXPECTED}")
    if points[-1][0] == 0:
        raise InputError(f"{path}: one point at 0; expected where the series ends, too, or --rate")
    return tuple(points)


def _rows(path: Path, lines: LineReader) -> Iterator[tuple[str, Any]]:
    header: list[str] | None = None
    for line in lines:
        where = f"{path}:{lines.number}"
        if line.lstrip().startswith(b"{"):
            try:
                yield where, msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(f"{where}: {error}; expected {EXPECTED}") from None
            continue
        cells = [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig", "replace")]))]
        if header is not None:
            yield where, dict(zip(header, cells, strict=False))
        elif not set(COLUMNS) <= set(cells):
            raise InputError(f"{where}: columns {', '.join(cells)}; expected {' and '.join(COLUMNS)}")
        else:
            header = cells
