"""Rolling fits as one HTML page: the pace, prediction errors and parameters by time, and where something changed."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from measure.fitindex import Estimate, FittedWindow
from report.pages.figures import DASHED, Figure, Trace, axis, figure, line, points
from report.pages.page import cohort_id, render
from report.rolling.drift import PACE, DriftPage, numbers_of, parameters_table, windows_table
from report.trace.panels import Panel

STATES: Final = {"identified": "circle", "borrowed": "circle-open", "open": "x"}
SAID: Final = {"identified": "fitted", "borrowed": "borrowed", "open": "not identified"}
ERRORS: Final = {"before": "model of the window before", "lender": "lender", "own": "its own, in sample"}
MOST_TICKS: Final = 8
DAY_S: Final = 86_400.0


def render_drift(page: DriftPage) -> str:
    panels = drift_panels(page)
    return render(
        "drift.html.jinja",
        drift_figures(page),
        tool="report drift",
        title=", ".join(dict.fromkeys(name for window in page.windows for name in window.traces)),
        headlines=page.headline,
        defined="docs/model.md",
        panels=panels,
        windows=windows_table(page),
        slots={},
    )


def drift_figures(page: DriftPage) -> dict[str, Figure]:
    return {panel.id: panel.figure for panel in drift_panels(page) if panel.figure is not None}


def drift_panels(page: DriftPage) -> list[Panel]:
    """Return the pace, the prediction errors, then each parameter."""
    names = list(dict.fromkeys(name for window in page.windows for name in numbers_of(window)))
    panels = [_number_panel(page, name) for name in names]
    panels.insert(1, Panel("errors", "Prediction error", _errors_figure(page), ERRORS_CAPTION, half=True))
    return panels


NUMBER_CAPTION: Final = (
    "Bars: 95 % intervals. Filled: fitted; hollow: borrowed, so that it follows the pace; crosses: not identified. "
    "Vertical lines: changes beyond the intervals and the usual drift."
)
PACE_CAPTION: Final = "Time of the window's steps over the lender's. " + NUMBER_CAPTION.partition(" Filled")[0]
ERRORS_CAPTION: Final = (
    "Median over requests of |predicted TTFT − seen| / seen, in runs without noise. An error of the model before that "
    "jumps and falls again is a change of the engine."
)


def _number_panel(page: DriftPage, name: str) -> Panel:
    told = [(window, one) for window in page.windows if (one := numbers_of(window).get(name)) is not None]
    ends = [end for _, one in told for end in (one.value, one.low, one.high) if end is not None]
    data = list(_marks(page, name, min(ends), max(ends)))
    x = [_hours(window, page) for window, _ in told]
    data.append(line(x, [_round(one.value) for _, one in told], 0, width=1.4, showlegend=False, hoverinfo="skip"))
    for state, symbol in STATES.items():
        some = [(window, one) for window, one in told if one.state == state]
        if some:
            data.append(_points(page, some, symbol, SAID[state]))
    title = "Pace" if name == PACE else name
    return Panel(
        cohort_id(name),
        title,
        figure(data, _time_axis(page), axis(told[0][1].unit)),
        PACE_CAPTION if name == PACE else NUMBER_CAPTION,
        parameters_table(page, name),
        half=True,
    )


def _points(page: DriftPage, some: Sequence[tuple[FittedWindow, Estimate]], symbol: str, name: str) -> Trace:
    values = [one for _, one in some]
    reach = {
        "array": [_round((one.high if one.high is not None else one.value) - one.value) for one in values],
        "arrayminus": [_round(one.value - (one.low if one.low is not None else one.value)) for one in values],
    }
    return points(
        [_hours(window, page) for window, _ in some],
        [_round(one.value) for one in values],
        0,
        {"size": 8, "symbol": symbol},
        name=name,
        text=[window.window for window, _ in some],
        error_y={"type": "data", "symmetric": False, "thickness": 1.4, "width": 3, **reach},
        hovertemplate="%{text}: %{y:.4~g}<extra></extra>",
    )


def _marks(page: DriftPage, name: str, low: float, high: float) -> Iterator[Trace]:
    """Draw a vertical line between two windows, or through the window that a change falls into."""
    windows = {window.window: window for window in page.windows}
    for change in page.changes:
        if change.number == name:
            window = windows[change.window]
            at = _hours(window, page) - (0.0 if change.within else window.length_s / 7_200.0)
            said = f"× {change.ratio:.3f} ({change.low:.3f} to {change.high:.3f})"
            ends = [_round(low), _round(high)]
            yield line([at, at], ends, 1, dash=DASHED, name=said, hoverinfo="name")


def _errors_figure(page: DriftPage) -> Figure:
    data: list[Trace] = []
    for slot, (key, name) in enumerate(ERRORS.items()):
        told = [(window, window.errors[key].median_abs) for window in page.windows if key in window.errors]
        if told:
            x, y = [_hours(window, page) for window, _ in told], [_round(error) for _, error in told]
            dash = "solid" if key == "before" else DASHED
            data.append(line(x, y, slot, dash=dash, name=name, hovertemplate="%{y:.1%}<extra>%{fullData.name}</extra>"))
    return figure(data, _time_axis(page), axis("|TTFT error|, median", tickformat=".0%", rangemode="tozero"))


def _hours(window: FittedWindow, page: DriftPage) -> float:
    """Hours from the first window's begin to the middle of this one."""
    return _round((window.begin_s - page.windows[0].begin_s + window.length_s / 2.0) / 3_600.0)


def _time_axis(page: DriftPage) -> dict[str, Any]:
    windows = page.windows
    shown = windows[:: -(-len(windows) // MOST_TICKS)]
    spans_days = windows[-1].begin_s - windows[0].begin_s >= DAY_S
    is_wall = windows[0].window.endswith("Z")
    texts = [_clock(window, spans_days=spans_days) if is_wall else window.window for window in shown]
    title = f"begin of the window, {windows[0].window.partition('T')[0]}, UTC" if is_wall else "begin of the window"
    return axis(title, tickvals=[_hours(window, page) for window in shown], ticktext=texts)


def _clock(window: FittedWindow, *, spans_days: bool) -> str:
    return datetime.fromtimestamp(window.begin_s, UTC).strftime("%d %H:%M" if spans_days else "%H:%M")


def _round(value: float) -> float:
    return float(f"{value:.5g}")
