"""LatencySample for the first token: survival by turn, with bands."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, MAIN, cohort_rows, cohort_title, recorded_traits
from measure.latency_samples import ttft_sample
from measure.metrics.sessions import busy_periods
from measure.resampling import CONFIDENCE, draw_weights
from measure.runs import Run
from report.compare.cells import Cell, describe, measure
from report.compare.panels import interval_text, quantile_text
from report.compare.results import LEVELS
from report.pages.figures import Curve, Survival, survival_figure
from report.pages.panels import Cell as TableCell
from report.pages.panels import Figure, Panel, Row, Table
from report.trace.measured import Measured

MOST_RESAMPLED: Final = 20_000
"""Requests of the longest trace that has bands."""
DRAWS: Final = 500
MOST_POINTS: Final = 160
_SLOTS: Final = {ALL: 0, FIRST_TURN: 2, LATER_TURNS: 1}


def wait_panel(measured: Measured) -> Panel:
    """Return survival of the TTFT by turn."""
    run, title = measured.run, "TTFT by turn"
    if not len(ttft_sample(run, np.arange(len(run)))):
        return Panel(title=title, missing="The trace has no time of a first token.")
    cohorts = cohort_rows(recorded_traits(run))
    by_turn = {name: cohorts[name] for name in MAIN if name in cohorts}
    if any(len(rows) == len(run) for name, rows in by_turn.items() if name != ALL):
        by_turn = {ALL: cohorts[ALL]}  # one cohort alone is all requests again
    units = np.unique(busy_periods(run), return_inverse=True)[1]
    draws = DRAWS if len(run) <= MOST_RESAMPLED else 0
    weights = draw_weights(int(units.max()) + 1 if draws else 0, draws, 0)
    waits = {name: ttft_sample(run, rows) for name, rows in by_turn.items()}
    cells = {cohort_title(name): measure(sample, units, weights) for name, sample in waits.items() if len(sample)}
    slots = {cohort_title(name): slot for name, slot in _SLOTS.items()}
    return Panel(
        title=title,
        id="waits",
        figure=_figure(cells, slots),
        caption=f"Share of requests still waiting after t: further left is faster. {_bands(run, cells)}",
        tables=[_numbers(cells)],
    )


def _figure(cells: Mapping[str, Cell], slots: Mapping[str, int]) -> Figure:
    drawn = [
        Survival(name=f"{name} ({len(cell.waits):,})", curve=_thinned(cell.curve), n=len(cell.waits), slot=slots[name])
        for name, cell in cells.items()
    ]
    return survival_figure(drawn, "time since arrival (ms)", "still without a first token")


def _thinned(curve: Curve) -> Curve:
    kept = np.unique(np.linspace(0, len(curve.time_ms) - 1, MOST_POINTS).astype(np.int64))
    return Curve(curve.time_ms[kept], curve.survival[kept], curve.low[kept], curve.high[kept])


def _bands(run: Run, cells: Mapping[str, Cell]) -> str:
    if len(run) > MOST_RESAMPLED:
        return f"No bands: more than {MOST_RESAMPLED:,} requests."
    if all(cell.drawn_ms is None for cell in cells.values()):
        return "No bands: the engine was seldom idle, so most waits hang together and few are independent."
    return f"Bands: {CONFIDENCE:.0%} bootstrap of busy periods."


def _numbers(cells: Mapping[str, Cell]) -> Table:
    rows: list[Row] = []
    for name, cell in cells.items():
        cell_ttft = describe(cell)
        quantiles = [getattr(cell_ttft, level) for level in LEVELS]
        rows.append(
            [name, f"{cell_ttft.n:,}", *(TableCell(quantile_text(each), interval_text(each)) for each in quantiles)]
        )
    return Table(["TTFT ms", "n", *LEVELS], rows, folded=True)
