"""Comparisons from Python, and figures (latency, prefix cache) for a notebook in the colours of the HTML pages."""

import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure.metrics.trace import analyse_chains, measure_run
from measure.runs import Run
from report.compare.comparison import CompareConfig, Compared, compare
from report.compare.panels import comparison_page
from report.pages.figures import Trace
from report.pages.panels import Figure
from report.trace.measured import Measured
from report.trace.page import trace_page
from sim.forecast.results import ForecastGrid
from sim.forecast.whatif import what_if_page
from tracefile.records.extras import load_extra

if TYPE_CHECKING:
    import plotly.graph_objects as go

FAINT = "2b"
"""Opacity of a band, in hexadecimal."""


def compare_traces(traces: Mapping[str, str | os.PathLike[str]], *, bootstrap: int = 500, seed: int = 0) -> Compared:
    """Compare traces with the first as reference; ``result`` is the object of ``report compare --json``.

    ``bootstrap``: resamples for intervals, 0: none. A single trace has latency curves and no errors. Raises InputError.
    """
    paths = {label: Path(path) for label, path in traces.items()}
    return compare(CompareConfig(traces=paths, seed=seed, bootstrap=bootstrap))


def draw(results: Compared | ForecastGrid | Run) -> "dict[str, go.Figure]":
    """Return the figures of a comparison, a forecast or a trace by name, such as ``survival-all`` or ``cache-size``.

    Raises InputError if plotly is missing.
    """
    if isinstance(results, Run):
        analysis = analyse_chains(results)
        page = trace_page(Measured(results, measure_run(results, analysis=analysis), analysis))
    else:
        page = what_if_page(results) if isinstance(results, ForecastGrid) else comparison_page(results)
    css = (files("report.pages") / "page.css").read_text(encoding="utf-8")
    colours: dict[str, str] = dict(re.findall(r"--([\w-]+): (#\w+)", css.partition("}")[0]))
    return {name: _styled(figure, colours) for name, figure in page.figures.items()}


def _styled(figure: Figure, colours: Mapping[str, str]) -> "go.Figure":
    figures = load_extra("plotly.graph_objects")
    layout = {name: value for name, value in figure["layout"].items() if name != "meta"}
    return figures.Figure(
        data=[_coloured(trace, colours) for trace in figure["data"]],
        layout={"template": "plotly_white", "hovermode": "closest", **layout},
    )


def _coloured(trace: Trace, colours: Mapping[str, str]) -> dict[str, Any]:
    """Apply the colours of page.js to a plotly trace."""
    properties, style = {name: value for name, value in trace.items() if name != "meta"}, trace["meta"]
    colour = colours["muted" if style["slot"] < 0 else f"c{style['slot'] % 8}"]
    if style["part"] == "band":
        return {
            **properties,
            "fillcolor": colour + FAINT,
            "line": {**properties.get("line", {}), "color": "rgba(0,0,0,0)"},
        }
    if style["part"] == "line":
        line = {"color": colour, "width": style["width"], "dash": style["dash"]}
        return {**properties, "line": {**properties.get("line", {}), **line}}
    marker = {"color": colour, "opacity": 1, "symbol": "circle", **style}
    names = ("color", "opacity") if trace["type"] == "bar" else ("color", "size", "opacity", "symbol")
    errors = {"error_y": {**properties["error_y"], "color": colour}} if "error_y" in properties else {}
    return {**properties, "marker": {name: marker[name] for name in names}, **errors}
