"""Run over time: requests in flight, token throughput, and sessions as rows of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from measure.metrics.results import Timeline
from measure.metrics.sessions import session_order
from measure.metrics.workload import wall
from measure.number_format import count, duration, share
from measure.runs import UNKNOWN, Run
from report.pages.figures import Trace, axis, band, figure, five_digits, line
from report.pages.panels import Panel, Table
from report.trace.measured import Measured
from tracefile.records.arrays import FloatArray, IntArray

NO_TIMES: Final = "The trace has no request with an arrival and an end."
ENDS_EACH: Final = 4
"""Requests that end in an interval of a rate, on average: with fewer a figure shows single requests."""


def load_panels(measured: Measured) -> list[Panel]:
    """Return requests in flight, and output and prompt token throughput."""
    timeline = measured.metrics.workload.timeline
    if timeline is None:
        return [Panel(title="Requests in flight", missing=NO_TIMES)]
    coarse = _coarse(timeline, measured.metrics.requests.n)
    flight = _panel(
        "in-flight",
        "Requests in flight",
        timeline,
        [_steps(timeline, timeline.in_flight, 0, "in flight")],
        "A line that rises to the end is a growing queue.",
        half=any(coarse.completion_tps),
    )
    panels = [flight]
    if any(coarse.completion_tps):
        data = [_steps(coarse, coarse.completion_tps, 3, "output")]
        note = "Tokens count at the end of their request. A level line is the limit of the engine or of the load."
        panels.append(_panel("output-rate", "Output tokens/s", coarse, data, note, half=True))
    if any(coarse.prompt_tps):
        panels.append(_prompt_panel(coarse, cached=bool(measured.metrics.requests.hit_reported)))
    return panels


def _coarse(timeline: Timeline, requests: int) -> Timeline:
    intervals = len(timeline.in_flight)
    wanted = min(intervals, -(-intervals * ENDS_EACH // requests))
    step = next(step for step in range(wanted, intervals + 1) if intervals % step == 0)
    means = {
        name: np.round(np.reshape(getattr(timeline, name), (-1, step)).mean(axis=1), 3).tolist()
        for name in ("in_flight", "prompt_tps", "completion_tps", "cached_tps", "uncached_tps")
    }
    return Timeline(interval_s=timeline.interval_s * step, **means)


def _prompt_panel(timeline: Timeline, *, cached: bool) -> Panel:
    data: list[Trace] = []
    note = "The engine reported no cached tokens: no prefix hits are drawn."
    if cached:
        data += _area(timeline, [0.0] * len(timeline.cached_tps), timeline.cached_tps, 1)
        data += _area(timeline, timeline.cached_tps, timeline.prompt_tps, 2)
        data.append(_steps(timeline, timeline.cached_tps, 1, "prefix hits"))
        note = "Between the lines: prefill tokens. The gap widens when cached blocks are evicted."
    data.append(_steps(timeline, timeline.prompt_tps, 2, "all prompt tokens"))
    return _panel("prompt-rate", "Prompt tokens/s", timeline, data, note)


def time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds < 900 else (60.0, "min") if seconds < 10_800 else (3600.0, "h")


def _unit(timeline: Timeline) -> tuple[float, str]:
    return time_unit(timeline.interval_s * len(timeline.in_flight))


def _times(timeline: Timeline) -> list[float]:
    interval = timeline.interval_s / _unit(timeline)[0]
    return [five_digits(step * interval) for step in range(len(timeline.in_flight) + 1)]


def _steps(timeline: Timeline, values: Sequence[float], slot: int, name: str) -> Trace:
    hover = f"%{{fullData.name}}: %{{y:,}} at %{{x:,}} {_unit(timeline)[1]}<extra></extra>"
    return line(_times(timeline), [*values, values[-1]], slot, name=name, line={"shape": "hv"}, hovertemplate=hover)


def _area(timeline: Timeline, low: Sequence[float], high: Sequence[float], slot: int) -> list[Trace]:
    return band(_times(timeline), [*low, low[-1]], [*high, high[-1]], slot, line={"shape": "hv", "width": 0})


def _panel(id_: str, title: str, timeline: Timeline, data: list[Trace], note: str, *, half: bool = False) -> Panel:
    x_axis = axis(f"time since the first arrival ({_unit(timeline)[1]})", rangemode="tozero")
    y_axis = axis("requests in flight" if id_ == "in-flight" else "tok/s", rangemode="tozero")
    caption = f"Steps are means over {duration(timeline.interval_s * 1e3)}. {note}"
    return Panel(title=title, id=id_, figure=figure(data, x_axis, y_axis), caption=caption, half=half)


MOST_ROWS: Final = 120
MOST_BARS: Final = 1_000
SHORT_SESSION: Final = 0.04
"""Share of the run: if most sessions are shorter, each row begins at its session's own begin."""
BAR_WIDTH: Final = 0.85
"""Height of a bar, as a share of a row: plotly makes bars taller where a class has few rows."""
HAIR: Final = 1 / 700
"""Least width of a bar, as a share of the run."""
_SHARES: Final = (
    (0.0, "no hit", 2),
    (0.5, "under 50 % cached", 5),
    (0.9, "50–90 % cached", 6),
    (1.0, "over 90 % cached", 1),
)
"""Upper limit of each class of hit shares, its name and its colour."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests to draw by session, with their rows."""

    requests: IntArray
    row: IntArray
    count: int
    text: str
    """Sentence on what is left out; empty: nothing."""


def session_panel(measured: Measured) -> Panel:
    """Return sessions as rows of requests, coloured by prefix hit share or by turn."""
    run, title = measured.run, "Sessions over time"
    begin_ms, wall_s = wall(run)
    if not wall_s:
        return Panel(title=title, missing=NO_TIMES)
    if all(session is None for session in run.sessions):
        return Panel(title=title, missing="The trace names no sessions: each request is alone.")
    rows = _rows(run)
    begins_s, span_s, since = _row_times(run, rows, begin_ms, wall_s)
    unit_s, unit = time_unit(span_s)
    width_s = np.maximum(run.e2e_ms[rows.requests] / 1e3, HAIR * span_s)
    data = [
        _bars(name, slot, begins_s[at] / unit_s, width_s[at] / unit_s, rows.row[at], unit=unit)
        for name, slot, at in _classes(run, rows.requests)
        if len(at)
    ]
    y_axis = axis("session, by first arrival", showticklabels=False, autorange="reversed", ticks="")
    x_axis = axis(f"time since {since} ({unit})", range=[0.0, span_s / unit_s * 1.01])
    height = 170 + min(5 * rows.count + 60, 560)
    return Panel(
        title=title,
        id="sessions",
        figure=figure(data, x_axis, y_axis, barmode="overlay", height=height, showlegend=True),
        caption="Row: a session. Bar: a request from arrival to end. Gap: think time. "
        f"{rows.text}Rows that change from cached to uncached: their blocks were evicted.",
        tables=[_class_table(run)],
    )


def _row_times(run: Run, rows: _Rows, begin_ms: float, wall_s: float) -> tuple[FloatArray, float, str]:
    """Return starts in seconds, total span, and their zero: start of the run, or of each session."""
    begins_s = (run.arrival_ms[rows.requests] - begin_ms) / 1e3
    firsts_s, lasts_s = np.full(rows.count, np.inf), np.full(rows.count, -np.inf)
    np.minimum.at(firsts_s, rows.row, begins_s)
    np.maximum.at(lasts_s, rows.row, begins_s + run.e2e_ms[rows.requests] / 1e3)
    lengths_s = (lasts_s - firsts_s)[np.isfinite(firsts_s)]
    if len(lengths_s) and np.median(lengths_s) < SHORT_SESSION * wall_s:  # else a diagonal of dots
        return begins_s - firsts_s[rows.row], float(lengths_s.max()), "the session's first arrival"
    return begins_s, wall_s, "the first arrival"


def _rows(run: Run) -> _Rows:
    """Choose sessions evenly by first arrival, with bounded rows and bars."""
    order = session_order(run)
    counts = np.diff(np.append(order.starts, len(order.rows)))
    by_arrival = np.argsort(run.arrival_ms[order.rows[order.starts]], kind="stable")
    step = max(-(-len(order) // MOST_ROWS), -(-len(run) // MOST_BARS), 1)
    chosen = by_arrival[::step]
    nth = max(1, -(-int(counts[chosen].sum()) // (2 * MOST_BARS)))
    requests = [order.rows[order.starts[index] : order.starts[index] + counts[index]][::nth] for index in chosen]
    row = np.repeat(np.arange(len(chosen)), [len(rows) for rows in requests])
    chosen_rows = np.concatenate(requests)
    text = f"{len(chosen):,} of {count(len(order))} sessions are drawn. " if len(chosen) < len(order) else ""
    text += f"Of their requests one in {nth}. " if nth > 1 else ""
    complete = ~np.isnan(run.arrival_ms[chosen_rows]) & ~np.isnan(run.e2e_ms[chosen_rows])
    return _Rows(chosen_rows[complete], row[complete], len(chosen), text)


def _classes(run: Run, requests: IntArray) -> list[tuple[str, int, IntArray]]:
    """Return name, colour and request indexes of each prefix hit class."""
    prompt, cached = run.prompt_tokens[requests], run.cached_tokens[requests]
    ok, reported = run.ok[requests], (prompt > 0) & (cached != UNKNOWN)
    if reported.any():
        shares = np.where(reported, cached / np.maximum(prompt, 1), np.nan)
        at = np.searchsorted([limit for limit, _, _ in _SHARES], np.minimum(shares, 1.0))
        classes = [
            (name, slot, np.flatnonzero(ok & reported & (at == index))) for index, (_, name, slot) in enumerate(_SHARES)
        ]
        classes.append(("cached tokens not reported", 7, np.flatnonzero(ok & ~reported)))
    else:
        first = run.turn[requests] == 1
        classes = [("turn 1", 2, np.flatnonzero(ok & first)), ("turns 2+", 1, np.flatnonzero(ok & ~first))]
    return [*classes, ("did not complete", 4, np.flatnonzero(~ok))]


def _class_table(run: Run) -> Table:
    every = np.arange(len(run))
    rows = [[name, count(len(at)), share(len(at) / len(run))] for name, _, at in _classes(run, every) if len(at)]
    return Table(["requests of the trace", "n", "share"], rows, folded=True)


def _bars(
    name: str, slot: int, start_s: FloatArray, length_s: FloatArray, row: IntArray, *, unit: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [float(f"{start:.6g}") for start in start_s],
        "x": [float(f"{length:.3g}") for length in length_s],
        "y": row.tolist(),
        "width": BAR_WIDTH,
        "meta": {"slot": slot, "part": "points"},
        "hovertemplate": f"%{{fullData.name}}: at %{{base:,}} {unit}<extra></extra>",
    }
