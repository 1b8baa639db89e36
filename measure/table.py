"""Text tables: columns as wide as their widest cell."""

from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "


@dataclass(frozen=True, slots=True)
class TextTable:
    """Table of text cells for a terminal and a page; the first column has the row names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def lines(self) -> list[str]:
        """Lines of the table; no lines without rows."""
        return table_lines(self.columns, self.rows, "<") if self.rows else []


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", gap: str = GAP) -> list[str]:
    """Return headings and rows as lines without trailing blanks; without ``headings`` only rows.

    ``align``: ``<`` or ``>`` by column; ``>`` for further columns. Raises ValueError for rows of different lengths.
    """
    lines = [headings, *rows] if headings else rows
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    sides = align.ljust(len(widths), ">")
    return [
        gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    ]
