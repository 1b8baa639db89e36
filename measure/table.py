"""Tables on a terminal: columns as wide as their widest cell."""

from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table in words, for a terminal and for a page; the first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def lines(self) -> list[str]:
        """Lines for a terminal; none without rows."""
        return table_lines(self.columns, self.rows, "<") if self.rows else []


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", gap: str = GAP) -> list[str]:
    """Return the headings and the rows as lines without trailing blanks.

    ``align``: one of ``<`` and ``>`` for each column, ``>`` for the columns beyond it. No headings: no such line.
    Raises ValueError if a row has another number of cells than the first.
    """
    lines = [headings, *rows] if headings else rows
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    sides = align.ljust(len(widths), ">")
    return [
        gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    ]
