"""Page as plain data: panels with figures, captions and tables, rendered to a terminal or to HTML."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import wrap
from typing import Any, Final

from measure.table import TextTable, table_lines
from tracefile.commandline.printing import printable

Figure = dict[str, Any]
"""A figure of plotly without colours: ``report.pages.figures``."""
WIDEST_NAME: Final = 26
"""Letters of a row's name in a terminal, on one line."""
SCREEN_LINES: Final = 40
SCREEN_COLUMNS: Final = 100
_MOST_CHECKS: Final = 6
"""Checks on one screen: failed, then too uncertain, then passed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and a detail that a page alone shows."""

    text: str
    detail: str = ""
    mood: str = ""
    """``good``, ``bad`` or ``muted``."""

    def __str__(self) -> str:
        return self.text


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Table; the first column names the rows. Lines of a cell: latency or other value, then error or effect."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    narrow: int | None = None
    """Columns in a terminal; 0: HTML only. None: all."""
    folded: bool = False
    """True: collapsed in HTML, and left out of a terminal."""
    words: bool = False
    """True: its cells are text, not numbers."""

    @property
    def lines(self) -> list[str]:
        """Lines for a terminal; none without rows or columns."""
        if self.narrow == 0 or not self.rows:
            return []
        rows = [[str(cell) for cell in row[: self.narrow]] for row in self.rows]
        split = [list(zip_longest(*map(_lines_of, row), fillvalue="")) for row in (self.columns[: self.narrow], *rows)]
        return table_lines((), [line for row in split for line in row], "<")


def _lines_of(text: str) -> list[str]:
    lines = text.split("\n")
    return [part for line in lines for part in (wrap(line, WIDEST_NAME) if len(line) > WIDEST_NAME else [line])]


def as_table(table: TextTable, caption: str = "", *, folded: bool = False) -> Table:
    return Table(table.columns, table.rows, caption, folded=folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Figure with caption, sentences and tables; ``missing`` alone if the trace lacks the data."""

    title: str
    id: str = ""
    """Anchor of the figure in the page: letters, digits and hyphens."""
    chapter: str = ""
    """Heading above it; empty: that of the panel before."""
    figure: Figure | None = None
    caption: str = ""
    """Meaning of the marks, and advice."""
    lines: Sequence[str] = ()
    """Sentences beside the table, in a terminal too."""
    tables: Sequence[Table] = ()
    half: bool = False
    """True: half a line wide, beside its neighbour."""
    missing: str = ""
    """Data that the trace lacks."""


@dataclass(frozen=True, slots=True)
class Card:
    """Headline number of a page."""

    title: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a gate, an SLO or a health check."""

    kind: str
    state: str
    """``passed``, ``met``, ``ok``: good; FAILED, MISSED, ``bad``, ``warning``: bad; else: too uncertain."""
    text: str

    @property
    def mood(self) -> str:
        state = self.state.lower()
        bad = state in ("failed", "missed", "bad", "warning")
        return "passed" if state in ("passed", "met", "ok") else "failed" if bad else "uncertain"

    def __str__(self) -> str:
        return f"{self.kind} {self.state}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Result for a terminal and a browser."""

    tool: str
    """Command that made it."""
    title: str
    defined: str
    """Document that defines every number."""
    headlines: Sequence[str]
    leads: Sequence[str] = ()
    """Sentences on sample and model."""
    notes: Sequence[str] = ()
    """Warnings."""
    cards: Sequence[Card] = ()
    checks: Sequence[Check] = ()
    steps: Sequence[str] = ()
    """Next steps, where a check failed."""
    brief: Sequence[Table] = ()
    """Tables of the one-screen form, which ``-v`` replaces by those of the panels. Empty: there is no such form."""
    panels: Sequence[Panel] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    """Colours of labels, whose rows have a mark in that colour."""
    dashed: Collection[str] = ()
    """Labels that are drawn with dashes."""

    @property
    def figures(self) -> dict[str, Figure]:
        return {panel.id: panel.figure for panel in self.panels if panel.figure is not None}

    @property
    def chapters(self) -> list[tuple[str, list[Panel]]]:
        chapters: list[tuple[str, list[Panel]]] = []
        for panel in self.panels:
            if not chapters or panel.chapter:
                chapters.append((panel.chapter, []))
            chapters[-1][1].append(panel)
        return chapters


def page_lines(page: Page) -> Iterator[str]:
    """Yield all sentences, tables and checks of a page for a terminal."""
    yield from wrap_lines([*page.headlines, *page.leads, *(f"note: {note}" for note in page.notes)])
    for panel in page.panels:
        for table in panel.tables:
            if table.lines and not table.folded:
                yield from _table_block(table)
        if panel.lines:
            yield from ("", *panel.lines)
    yield from map(str, page.checks)
    yield from (f"next: {step}" for step in page.steps)


def screen_lines(page: Page) -> list[str]:
    """Return a page on one screen: verdict, numbers, gates, next steps. Tables get the lines that text leaves."""
    checks = sorted(page.checks, key=lambda check: ("failed", "uncertain", "passed").index(check.mood))
    notes = [f"note: {note}" for note in page.notes[:2]]
    above = wrap_lines([*_verdict(checks), *page.headlines[:1], *page.leads, *notes])
    below = wrap_lines(
        [
            *map(str, checks[:_MOST_CHECKS]),
            *(f"next: {step}" for step in page.steps[:2]),
            "more: -v prints all tables, gates and notes; --html PAGE writes the figures",
        ]
    )
    tables = [line for table in page.brief for line in _table_block(table)]
    return [*above, *tables[: SCREEN_LINES - len(above) - len(below) - 1], "", *below][-SCREEN_LINES:]


def _verdict(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the outcome of all checks, the worst first, with the number of each."""
    counts = Counter(check.state for check in checks)
    if counts:
        (worst, count), *better = counts.items()
        parts = [f"{count} of {len(checks)} {checks[0].kind}s", *(f"{count} {state}" for state, count in better)]
        yield f"verdict: {worst} ({', '.join(parts)})"


def _table_block(table: Table) -> Iterator[str]:
    """Yield a blank line, the caption and the lines of a table."""
    yield from ("", *filter(None, [table.caption]), *table.lines)


def wrap_lines(lines: Iterable[str]) -> list[str]:
    """Break lines at blanks to the width of a screen; indent their continuation."""
    return [
        part
        for line in lines
        for part in wrap(line, SCREEN_COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def print_page(page: Page, *, beside_json: bool, verbose: bool = True) -> None:
    """Print a page, on one screen unless ``verbose``; to stderr beside JSON on stdout."""
    for line in page_lines(page) if verbose or not page.brief else screen_lines(page):
        print(printable(line), file=sys.stderr if beside_json else sys.stdout)
