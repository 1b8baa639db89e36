"""Waits for the first token: survival by turn and by hit, with bands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from measure import wording
from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, MAIN, cohort_rows, cohort_title, own_traits
from measure.metrics.sessions import busy_periods
from measure.resampling import CONFIDENCE, draw_weights
from measure.runs import UNKNOWN, Run
from measure.table import TextTable
from measure.waits import first_token_waits
from report.compare import terminal
from report.compare.cells import Cell, Curve, describe, measure
from report.compare.results import LEVELS, Duration
from report.files.measured import Measured
from report.pages.figures import axis, figure, survival_band, survival_line
from report.trace.panels import Panel
from tracefile.records.arrays import IntArray

MOST_RESAMPLED: Final = 10_000
"""Requests that intervals are drawn from; of a longer trace every n-th busy period."""
DRAWS: Final = 500
MOST_POINTS: Final = 160
_SLOTS: Final = {ALL: 0, FIRST_TURN: 2, LATER_TURNS: 1, "hit": 3, "no hit": 4}


@dataclass(frozen=True, slots=True)
class _Resampling:
    """Units that the bootstrap draws, of all requests or of some."""

    unit_of_row: IntArray
    """Dense numbers from 0; UNKNOWN: a request outside of the sample."""
    weights: npt.NDArray[np.uint16]
    step: int
    """1: every busy period is in the sample, n: every n-th."""

    def rows(self, rows: IntArray) -> IntArray:
        return rows if self.step == 1 else rows[self.unit_of_row[rows] != UNKNOWN]


def wait_panels(measured: Measured) -> list[Panel]:
    """Return survival of the TTFT by turn, and by hit where cached tokens are known."""
    run = measured.run
    every = np.arange(len(run))
    if not len(first_token_waits(run, every)):
        return [Panel("waits", "Waiting for the first token", missing="The trace has no time of a first token.")]
    found = cohort_rows(own_traits(run))
    by_turn: dict[str, IntArray] = {name: found[name] for name in MAIN if name in found}
    if any(len(rows) == len(run) for name, rows in by_turn.items() if name != ALL):
        by_turn = {ALL: every}  # one cohort alone is the whole again
    by_hit = {"hit": np.flatnonzero(run.cached_tokens > 0), "no hit": np.flatnonzero(run.cached_tokens == 0)}
    resampling = _resampling(run)
    return [
        _panel(run, "waits", "By turn", by_turn, resampling),
        _panel(run, "waits-by-hit", "By hit", by_hit, resampling)
        if all(len(first_token_waits(run, rows)) for rows in by_hit.values())
        else Panel("waits-by-hit", "By hit", half=True, missing=_no_hits(run)),
    ]


def _no_hits(run: Run) -> str:
    told = run.cached_tokens[run.cached_tokens != UNKNOWN]
    if not len(told):
        return "The engine reported no cached tokens, so hits and misses cannot be told apart."
    if (told > 0).any() and (told == 0).any():
        return "Too few of the requests that report cached tokens have a time of their first token."
    return (
        f"Every request that reports cached tokens had {'a hit' if told[0] else 'none'}: there is nothing to compare."
    )


def _resampling(run: Run) -> _Resampling:
    """Number the busy periods, of a long trace every n-th."""
    units = busy_periods(run)
    step = -(-len(run) // MOST_RESAMPLED)
    kept = units % step == 0
    numbers, dense = np.unique(units[kept], return_inverse=True)
    unit_of_row = np.full(len(run), UNKNOWN)
    unit_of_row[kept] = dense
    # A period that is most of the trace tells one thing: no interval, and no million columns.
    draws = DRAWS if np.count_nonzero(kept) <= 2 * MOST_RESAMPLED else 0
    return _Resampling(unit_of_row, draw_weights(len(numbers) if draws else 0, draws, 0), step)


def _panel(run: Run, id_: str, title: str, cohorts: Mapping[str, IntArray], resampling: _Resampling) -> Panel:
    cells, banded = {}, {}
    for name, rows in cohorts.items():
        waits = first_token_waits(run, rows)
        if len(waits):
            sampled = first_token_waits(run, resampling.rows(rows))
            banded[name] = measure(sampled, resampling.unit_of_row, resampling.weights)
            cells[name] = banded[name] if resampling.step == 1 else measure(waits, np.zeros(len(run), np.int64), None)
    start_ms = max(0.8 * min(float(cell.curve.time_ms[0]) for cell in cells.values()), 1e-3)
    data = [
        trace
        for name, cell in banded.items()
        if len(cell.waits)
        for trace in survival_band(
            f"{_title(name)} ({len(cells[name].waits):,})", _drawn(cell.curve), _SLOTS[name], start_ms
        )
    ]
    data += [
        survival_line(
            f"{_title(name)} ({len(cell.waits):,})", _drawn(cell.curve), len(cell.waits), _SLOTS[name], start_ms
        )
        for name, cell in cells.items()
    ]
    y_axis = axis("still without a first token", tickformat=".3~%", range=[0, 1.02])
    return Panel(
        id_,
        title,
        figure(data, axis("time since arrival (ms)", type="log"), y_axis),
        caption=f"Share of requests still waiting after t: further left is faster. {_bands(run, banded, resampling)}",
        numbers=_numbers(cells, banded),
        toggles="xy",
        half=True,
    )


def _drawn(curve: Curve) -> Curve:
    """Return the curve in so many points that half a line can show: a page has many figures."""
    kept = np.unique(np.linspace(0, len(curve.time_ms) - 1, MOST_POINTS).astype(np.int64))
    return Curve(curve.time_ms[kept], curve.survival[kept], curve.low[kept], curve.high[kept])


def _title(name: str) -> str:
    return cohort_title(name) if name in MAIN else wording.capitalized(name)


def _bands(run: Run, banded: Mapping[str, Cell], resampling: _Resampling) -> str:
    if all(cell.drawn_ms is None for cell in banded.values()):
        return "No bands: the engine was seldom idle, so most waits hang together and few are independent."
    said = f"Bands: {CONFIDENCE:.0%} bootstrap of busy periods"
    if resampling.step == 1:
        return f"{said}."
    sampled = np.count_nonzero(resampling.unit_of_row != UNKNOWN)
    return f"{said}, of {sampled:,} of {len(run):,} requests (of {resampling.step} periods one)."


def _numbers(cells: Mapping[str, Cell], banded: Mapping[str, Cell]) -> TextTable:
    rows = []
    for name, cell in cells.items():
        whole, sampled = describe(cell), describe(banded[name])
        rows.append([_title(name), f"{whole.n:,}", *(_quantile(whole, sampled, level) for level in LEVELS)])
    return TextTable(["TTFT ms", "n", *LEVELS], rows)


def _quantile(whole: Duration, sampled: Duration, level: str) -> str:
    interval = terminal.interval_text(getattr(sampled, level))
    value = terminal.quantile_text(getattr(whole, level))
    return f"{value} [{interval}]" if interval else value
