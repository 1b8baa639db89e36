"""Page of a sweep: throughput and latency, slices along each axis, table of points."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from measure.number_format import NOTHING
from report.grid.points import (
    Grid,
    Point,
    Setting,
    Span,
    effect_text,
    setting_text,
    title_of,
    value_text,
    workload_of,
)
from report.pages.figures import DASHED, Trace, axis, figure, five_digits, line, plain, points
from report.pages.panels import Card, Figure, Page, Panel, Table

_LOOKS: Final = {"today": ("diamond", 2), "chosen": ("star", 1)}
"""Symbol and colour of a marked point."""
MOST_ROWS: Final = 60
"""Points of a table; of more, those with a mark."""
MOST_COLUMNS: Final = 6
"""Measures in a terminal."""
STEEP: Final = 20
"""The same of a measure."""
_LOG_FROM: Final = 4
"""Largest over smallest value from which an axis is logarithmic."""


def grid_page(grid: Grid, tool: str, defined: str) -> Page:
    chosen = next((point for point in grid.points if "chosen" in point.marks), None)
    labels = dict.fromkeys(str(point.settings["label"]) for point in grid.points if "label" in point.settings)
    shown = [point for point in grid.points if point.marks or len(grid.points) <= MOST_ROWS]
    facts = [f"{point.name or 'today'}: {fact}" for point in shown for fact in (*point.warnings, *point.assumptions)]
    table = point_table(shown, grid.columns, grid.axes)
    panels = [*([_frontier_panel(grid)] if len(grid.axes) > 1 else []), *_slice_panels(grid, chosen)]
    panels.append(Panel(chapter="Points", title="Points", tables=[table], lines=list(dict.fromkeys(facts))))
    return Page(
        tool=tool,
        title=grid.source,
        defined=defined,
        headlines=grid.headlines,
        leads=grid.verdicts,
        notes=grid.notes,
        cards=[Card(title_of(name), value_text(chosen, name), "") for name in grid.columns[:4]] if chosen else [],
        panels=panels,
        slots={label: slot for slot, label in enumerate(labels)},
    )


def point_table(selected: Sequence[Point], columns: Sequence[str], axes: Sequence[str], caption: str = "") -> Table:
    """Return a row per point: settings, marks, SLOs, latency and throughput with effects. No empty columns."""
    shown = [name for name in columns if any(point.measures.get(name) is not None for point in selected)]
    has_slos = any(point.meets is not None for point in selected)
    marked = any(point.marks for point in selected)
    rows = []
    for point in selected:
        first = [setting_text(point.settings.get(name)) for name in axes] or [point.name]
        first += [" ".join(point.marks) or NOTHING] if marked else []
        first += [NOTHING if point.meets is None else "met" if point.meets else "missed"] if has_slos else []
        rows.append([*first, *(f"{value_text(point, name)}\n{effect_text(point, name)}".strip() for name in shown)])
    heads = [*(axes or [""]), *(["marks"] if marked else []), *(["SLOs"] if has_slos else [])]
    return Table([*heads, *map(title_of, shown)], rows, caption, narrow=len(heads) + MOST_COLUMNS)


def _frontier_panel(grid: Grid) -> Panel:
    data: list[Trace] = []
    workloads = dict.fromkeys(workload_of(point) for point in grid.points)
    for number, workload in enumerate(workloads):
        pareto = [point for point in grid.points if "pareto" in point.marks and workload_of(point) == workload]
        pareto.sort(key=lambda point: point.middle(grid.throughput) or 0.0)
        along, up = ([_middle(point, name) for point in pareto] for name in (grid.throughput, grid.latency))
        data.append(line(along, up, -1, width=1.6, name="Pareto set", showlegend=not number, hoverinfo="skip"))
    for slot, label in enumerate(dict.fromkeys(point.settings.get("label") for point in grid.points)):
        labelled = [point for point in grid.points if point.settings.get("label") == label]
        data += _dots(grid, labelled, "circle", slot, str(label or "points"))
    for mark, (symbol, slot) in _LOOKS.items():
        data += _dots(grid, [point for point in grid.points if mark in point.marks], symbol, slot, mark)
    title = "Throughput and latency"
    return Panel(
        chapter=title,
        title=title,
        id="frontier",
        figure=figure(data, axis(title_of(grid.throughput), type="log"), axis(title_of(grid.latency), type="log")),
        caption="Lower and further right is better. The line joins the Pareto set.",
    )


def _dots(grid: Grid, selected: Sequence[Point], symbol: str, slot: int, name: str) -> list[Trace]:
    plotted = [point for point in selected if point.middle(grid.latency) and point.middle(grid.throughput)]
    if not plotted:
        return []
    x, y = ([_middle(point, measure) for point in plotted] for measure in (grid.throughput, grid.latency))
    names = [plain(point.name or "today") for point in plotted]
    hover = "%{customdata}: %{y:,.1f} ms at %{x:,.1f} tok/s<extra></extra>"
    style = {"size": 9 if symbol == "circle" else 15, "symbol": symbol}
    error_y = _bars([point.measures[grid.latency].value for point in plotted])
    return [points(x, y, slot, style, name=name, customdata=names, hovertemplate=hover, error_y=error_y)]


def _middle(point: Point, name: str) -> float | None:
    value = point.middle(name)
    return None if value is None else five_digits(value)


def _bars(spans: Sequence[Span]) -> dict[str, Any]:
    middles = [span.middle or 0.0 for span in spans]
    above = [0.0 if span.high is None else span.high - middle for span, middle in zip(spans, middles, strict=True)]
    below = [0.0 if span.low is None else middle - span.low for span, middle in zip(spans, middles, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.4, "width": 3}


def _slice_panels(grid: Grid, chosen: Point | None) -> Iterator[Panel]:
    """Yield latency, and hit rate or throughput, along an axis; other axes as at the chosen point or today."""
    center = chosen or next((point for point in grid.points if "today" in point.marks), grid.points[0])
    labelled = "label" in grid.axes
    for name in grid.axes[1:] if labelled else grid.axes:
        fixed = set(grid.axes) - {name, "label"}
        lines: dict[str, list[Point]] = {}
        for point in grid.points:
            if all(point.settings[axis_name] == center.settings[axis_name] for axis_name in fixed):
                lines.setdefault(str(point.settings.get("label", "")), []).append(point)
        for measure in dict.fromkeys((grid.latency, grid.throughput if labelled else "hit_rate")):
            plotted = {
                label: [point for point in series if point.middle(measure) is not None]
                for label, series in lines.items()
            }
            if max(map(len, plotted.values())) > 1 or labelled:
                panel_id = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-{measure}")
                title = f"{title_of(measure)} by {name}"
                plot = _slice(measure, name, plotted, grid.limit if measure == grid.latency else None)
                yield Panel(title=title, id=panel_id, figure=plot, caption=f"{title}; bars: intervals.", half=True)


def _slice(measure: str, name: str, lines: Mapping[str, Sequence[Point]], limit: float | None) -> Figure:
    """Draw a measure along an axis; non-numeric values keep the grid order. ``limit``: a latency limit line."""
    every = [point.settings.get(name) for series in lines.values() for point in series]
    numbers = [float(value) for value in every if isinstance(value, int | float) and not isinstance(value, bool)]
    numeric = len(numbers) == len(every)
    data: list[Trace] = []
    for slot, (label, series) in enumerate(lines.items()):
        pairs = [(_coordinate(point.settings.get(name), numeric=numeric), point) for point in series]
        pairs = sorted(pairs, key=lambda pair: pair[0]) if numeric else pairs
        data += _slice_line(measure, label, pairs, slot, joined=numeric)
    if limit is not None and numeric:
        across = [min(numbers), max(numbers)]
        data.append(line(across, [limit] * 2, -1, width=1.4, showlegend=False, hoverinfo="skip"))
    log = numeric and 0 < _LOG_FROM * min(numbers) < max(numbers)
    values = [value for series in lines.values() for point in series if (value := point.middle(measure))]
    steep = measure != "hit_rate" and max(values, default=0.0) > STEEP * min(values, default=1.0)
    style = {"type": "log"} if steep else {"tickformat": ".0%"} if measure == "hit_rate" else {"rangemode": "tozero"}
    scale = "log" if log else "linear" if numeric else "category"
    return figure(data, axis(name, type=scale), axis(title_of(measure), **style))


def _coordinate(value: Setting, *, numeric: bool) -> Any:
    return value if numeric else plain(setting_text(value))


def _slice_line(
    measure: str, label: str, pairs: Sequence[tuple[Any, Point]], slot: int, *, joined: bool
) -> Iterator[Trace]:
    x, series = [value for value, _ in pairs], [point for _, point in pairs]
    y = [_middle(point, measure) for point in series]
    if joined:
        yield line(x, y, slot, dash=DASHED, showlegend=False, hoverinfo="skip")
    texts = [f"{plain(label)} {value_text(point, measure)}" for point in series]
    hover = "%{x}: %{customdata}<extra></extra>"
    symbols = ["x" if point.meets is False else "circle" for point in series]
    style = {"size": 8, "symbol": symbols}
    bars = _bars([point.measures[measure].value for point in series])
    yield points(x, y, slot, style, showlegend=False, customdata=texts, error_y=bars, hovertemplate=hover)
