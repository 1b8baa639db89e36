"""A simulated sweep as one HTML page: what to change, the Pareto set, and each axis through the chosen point."""

from collections.abc import Sequence
from typing import Any, Final

from report.pages.figures import DASHED, Figure, Trace, axis, figure, five_digits, line, plain, points
from report.pages.page import Card, cohort_id, render
from report.pages.whatif import Span, span_text
from report.sweeps.grid import (
    COST,
    THROUGHPUT,
    GridPoint,
    GridSweep,
    headlines,
    latency_title,
    point_table,
    reading,
    setting_text,
    table_points,
)
from report.trace.panels import Panel

_LOOKS: Final = {"today": ("diamond", 2), "knee": ("square-open", 3), "chosen": ("star", 1)}
"""Symbol and colour of a marked point."""


def grid_figures(sweep: GridSweep) -> dict[str, Figure]:
    """Return the page's figures by id."""
    return {panel.id: panel.figure for panel in _panels(sweep) if panel.figure is not None}


def render_grid(sweep: GridSweep) -> str:
    return render(
        "grid.html.jinja",
        grid_figures(sweep),
        tool="sim sweep",
        title=sweep.trace,
        headlines=headlines(sweep),
        defined="docs/capacity.md",
        sweep=sweep,
        cards=list(_cards(sweep)),
        panels=_panels(sweep),
        table=point_table(sweep),
        assumed=[
            (point.name or "today's", said)
            for point in table_points(sweep)
            for said in (*point.assumptions, *point.warnings)
        ],
    )


def _cards(sweep: GridSweep) -> Sequence[Card]:
    shown = sweep.chosen or sweep.today
    names = {sweep.latency: latency_title(sweep), "hit_rate": "Hit rate", THROUGHPUT: "Output tokens/s per GPU"}
    if sweep.gpu_price is not None:
        names[COST] = "Cost per million output tokens"
    return [
        Card(title, span_text(shown.measures[name], reading(name)), f"today {_text(sweep.today, name)}")
        for name, title in names.items()
    ]


def _text(point: GridPoint, name: str) -> str:
    return span_text(point.measures[name], reading(name))


def _panels(sweep: GridSweep) -> list[Panel]:
    said = "Lower and further right is better. The line joins the Pareto set; small points are the others."
    drawn = [Panel("frontier", "Throughput per GPU and latency", _frontier(sweep), said, toggles="xy")]
    for name, own in sweep.slices.items():
        among = "All else as at the chosen point" if sweep.chosen is not None else "All else as today"
        for measure, title in ((sweep.latency, f"{latency_title(sweep)} (ms)"), ("hit_rate", "hit rate")):
            shown = _slice(sweep, name, own, measure, title)
            id_ = f"{cohort_id(name)}-{cohort_id(measure)}"
            drawn.append(Panel(id_, f"{title} by {name}", shown, f"{among}.", half=True, toggles=""))
    return drawn


def _frontier(sweep: GridSweep) -> Figure:
    x, y = [five_digits(one) for one, _ in sweep.cloud], [five_digits(other) for _, other in sweep.cloud]
    data: list[Trace] = [points(x, y, -1, {"size": 5, "opacity": 0.35}, name="other points", hoverinfo="skip")]
    along, up = ([_middle(point, name) for point in sweep.frontier] for name in (THROUGHPUT, sweep.latency))
    data.append(line(along, up, 0, name="Pareto set", hoverinfo="skip"))
    data += _marks(sweep, sweep.frontier, "circle", 0, "Pareto set", showlegend=False)
    for mark, (symbol, slot) in _LOOKS.items():
        data += _marks(sweep, [point for point in table_points(sweep) if mark in point.marks], symbol, slot, mark)
    titles = axis("output tokens per second per GPU", type="log"), axis(f"{latency_title(sweep)} (ms)", type="log")
    return figure(data, *titles)


def _marks(sweep: GridSweep, some: Sequence[GridPoint], symbol: str, slot: int, name: str, **more: bool) -> list[Trace]:
    told = [point for point in some if point.middle(sweep.latency) and point.middle(THROUGHPUT)]
    if not told:
        return []
    x, y = ([_middle(point, name) for point in told] for name in (THROUGHPUT, sweep.latency))
    hover = "%{customdata}: %{y:,.1f} ms at %{x:,.1f} tokens/s per GPU<extra></extra>"
    names = [plain(point.name or "today's") for point in told]
    reach = {"error_y": _reach([point.measures[sweep.latency] for point in told])}
    look = {"size": {"circle": 9, "star": 16}.get(symbol, 13), "symbol": symbol}
    return [points(x, y, slot, look, name=name, customdata=names, hovertemplate=hover, **reach, **more)]


def _middle(point: GridPoint, name: str) -> float | None:
    value = point.middle(name)
    return None if value is None else five_digits(value)


def _reach(spans: Sequence[Span]) -> dict[str, object]:
    """Return intervals as error bars."""
    middles = [span.middle or 0.0 for span in spans]
    above = [0.0 if span.high is None else span.high - middle for span, middle in zip(spans, middles, strict=True)]
    below = [0.0 if span.low is None else middle - span.low for span, middle in zip(spans, middles, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.4, "width": 3}


def _slice(sweep: GridSweep, name: str, own: Sequence[GridPoint], measure: str, title: str) -> Figure:
    """Draw a measure by an axis; words and yes or no stand in the grid's order."""
    told = [point for point in own if point.middle(measure) is not None]
    values = [point.settings[name] for point in told]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        numbers = []
    if numbers:
        told = [told[at] for at in sorted(range(len(told)), key=lambda at: numbers[at])]
        numbers = sorted(numbers)
    x: list[Any] = [*numbers] or [plain(setting_text(value)) for value in values]
    y = [_middle(point, measure) for point in told]
    look = {"size": 8, "symbol": "circle"}
    unit = "%{y:.1%}" if measure == "hit_rate" else "%{y:,.1f} ms"
    data = [points(x, y, 0, look, showlegend=False, error_y=_reach([point.measures[measure] for point in told]))]
    data[0]["hovertemplate"] = f"%{{x}}: {unit}<extra></extra>"
    if numbers:
        data.insert(0, line(x, y, 0, dash=DASHED, showlegend=False, hoverinfo="skip"))
    for mark, (symbol, slot) in _LOOKS.items():
        at = [place for place, point in enumerate(told) if mark in point.marks]
        if at:
            spot = {"size": 13, "symbol": symbol}
            data.append(points([x[place] for place in at], [y[place] for place in at], slot, spot, name=mark))
    scale = "category" if not numbers else "log" if 0 < 4 * min(numbers) < max(numbers) else "linear"
    y_axis = axis(title, tickformat=".0%") if measure == "hit_rate" else axis(title, rangemode="tozero")
    return figure(data, axis(name, type=scale), y_axis)
