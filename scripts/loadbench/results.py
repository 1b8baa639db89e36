"""The table: a row a figure, a column a client, and what each goal says of ours."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scripts.loadbench.runs import Measured
from scripts.markdown import markdown_table

OURS = "kvtape"


@dataclass(frozen=True, slots=True)
class Goal:
    """Bound of a figure of ours."""

    sign: Literal["≥", "≤", "<"]
    bound: float
    beside: str = ""
    """Client whose own figure is the unit; empty: none."""

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:,g}" + (f" × {self.beside}" if self.beside else "")

    def reached(self, figures: Mapping[str, float | None]) -> bool | None:
        """Judge our figure; null: it, or the client's beside it, was not measured."""
        ours, unit = figures.get(OURS), figures.get(self.beside) if self.beside else 1.0
        if ours is None or unit is None:
            return None
        bound = self.bound * unit
        return ours >= bound if self.sign == "≥" else ours <= bound if self.sign == "≤" else ours < bound


@dataclass(frozen=True, slots=True)
class Row:
    """Figure of a case."""

    case: str
    name: str
    figure: Callable[[Measured], float | None]
    form: str
    goal: Goal | None = None


ROWS = [
    Row("short", "16-token streams, requests/s", lambda m: m.requests_per_s, ",.0f", Goal("≥", 1.3, "aiohttp")),
    Row("short", "– CPU µs per request", lambda m: m.cpu_us_per_request, ",.0f"),
    Row("short", "– cores used by the client", lambda m: m.client_cpu, ".2f"),
    Row("short", "– cores used by the server", lambda m: m.server_cpu, ".2f"),
    Row("short", "– PSS MB, all processes", lambda m: m.pss_mb or None, ".0f", Goal("≤", 150)),
    Row("short", "– RSS MB, summed", lambda m: m.rss_mb or None, ".0f"),
    Row("short", "– processes", lambda m: m.processes, ".0f"),
    Row("short", "launch to first request, s", lambda m: m.first_request_s, ".2f", Goal("<", 1.5)),
    Row("long", "256-token streams, events/s", lambda m: m.events_per_s, ",.0f", Goal("≥", 1.5, "aiohttp")),
    Row("long", "– CPU µs per request", lambda m: m.cpu_us_per_request, ",.0f"),
    Row("long", "– cores used by the client", lambda m: m.client_cpu, ".2f"),
    Row("long", "– cores used by the server", lambda m: m.server_cpu, ".2f"),
    Row("rate50", "50/s: TTFT error p50, ms", lambda m: m.ttft_error_p50_ms, ".2f", Goal("≤", 0.2)),
    Row("rate50", "– TTFT error p99, ms", lambda m: m.ttft_error_p99_ms, ".2f", Goal("≤", 0.5)),
    Row("rate50", "– lag p99, ms", lambda m: m.lag_p99_ms, ".2f", Goal("≤", 2)),
    Row("rate50", "– cores used by the client", lambda m: m.client_cpu, ".2f"),
    Row("rate200", "200/s: TTFT error p50, ms", lambda m: m.ttft_error_p50_ms, ".2f", Goal("≤", 0.3)),
    Row("rate200", "– TTFT error p99, ms", lambda m: m.ttft_error_p99_ms, ".2f", Goal("≤", 1.5, "bare loop")),
    Row("rate200", "– lag p99, ms", lambda m: m.lag_p99_ms, ".2f", Goal("≤", 2)),
    Row("rate200", "– cores used by the client", lambda m: m.client_cpu, ".2f"),
]


class Results:
    """All runs of a benchmark; a figure is the median over a client's runs of a case."""

    def __init__(self, runs: Iterable[Measured]) -> None:
        self.runs = list(runs)

    def figure(self, row: Row, subject: str) -> float | None:
        """Return a cell; null: not measured."""
        values = [row.figure(run) for run in self.runs if (run.subject, run.case) == (subject, row.case)]
        found = [value for value in values if value is not None]
        return statistics.median(found) if found else None

    def table(self, subjects: Sequence[str]) -> str:
        """Rows that somebody has a figure for; ratios are ours over each of the others."""
        others = [name for name in subjects if name != OURS]
        headings = ["", *subjects, *(f"{OURS} / {name}" for name in others), "goal", "reached"]
        rows = []
        for row in ROWS:
            figures = {name: self.figure(row, name) for name in subjects}
            if any(figure is not None for figure in figures.values()):
                rows.append(_cells(row, figures, others))
        return markdown_table(headings, rows, numbers=True)


def _cells(row: Row, figures: dict[str, float | None], others: Sequence[str]) -> list[str]:
    ours = figures.get(OURS)
    cells = [row.name, *("" if figure is None else format(figure, row.form) for figure in figures.values())]
    cells += [_ratio(ours, figures[name]) for name in others]
    reached = None if row.goal is None else row.goal.reached(figures)
    return [*cells, str(row.goal or ""), "" if reached is None else "yes" if reached else "NO"]


def _ratio(ours: float | None, other: float | None) -> str:
    return f"{ours / other:.2f}" if ours is not None and other else ""
