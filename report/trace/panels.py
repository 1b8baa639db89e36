"""A panel of a trace's page: a figure with its caption and numbers, or the reason why there is none."""

from collections.abc import Callable
from dataclasses import dataclass

from measure.table import TextTable
from report.files.measured import Measured
from report.pages.figures import Figure


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure and everything that explains it; ``missing`` alone if the trace lacks what it needs."""

    id: str
    """Of the place in the page: letters, digits and hyphens."""
    title: str
    figure: Figure | None = None
    caption: str = ""
    """Meaning of the marks, and what to look for."""
    numbers: TextTable | None = None
    """The figure in text, for a reader who does not see it."""
    toggles: str = ""
    """Axes that switch between log and linear: x, y, xy."""
    half: bool = False
    """True: half a line wide, beside its neighbour."""
    missing: str = ""
    """Sentence on the facts that the trace lacks."""


Draw = Callable[[Measured], list[Panel]]


@dataclass(frozen=True, slots=True)
class Chapter:
    """Panels under one heading."""

    title: str
    lead: str
    draws: tuple[Draw, ...]
