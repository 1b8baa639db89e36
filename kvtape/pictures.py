"""Comparisons from Python, and figures for a notebook in the colours of the pages."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure.metrics.trace import measure_run, study_chains
from measure.runs import Run
from report.compare.comparison import CompareConfig, Compared, compare
from report.files.measured import Measured
from report.pages.figures import Figure, Trace
from report.pages.forecastpages import what_if_figures
from report.pages.page import comparison_figures
from report.pages.palette import slot_colour
from report.pages.whatif import WhatIf
from report.trace.page import draw_chapters, trace_figures
from tracefile.records.extras import load_extra

if TYPE_CHECKING:
    import plotly.graph_objects as go

FAINT = "2b"
"""Opacity of a band, in hexadecimal."""


def compare_traces(traces: Mapping[str, str | os.PathLike[str]], *, bootstrap: int = 500, seed: int = 0) -> Compared:
    """Compare traces by label, the first the truth of the others; ``result`` is what ``report compare --json`` prints.

    ``bootstrap``: draws for intervals, 0: none. One trace alone has its curves and no errors. Raises InputError.
    """
    paths = {label: Path(path) for label, path in traces.items()}
    return compare(CompareConfig(traces=paths, truths={}, repeats=(), seed=seed, bootstrap=bootstrap))


def draw(found: Compared | WhatIf | Run) -> "dict[str, go.Figure]":
    """Return the figures of a comparison, a forecast or a trace by name, such as ``survival-all`` or ``cache-size``.

    Raises InputError if plotly is missing.
    """
    return {name: _styled(figure) for name, figure in _figures(found).items()}


def _figures(found: Compared | WhatIf | Run) -> dict[str, Figure]:
    if isinstance(found, Run):
        study = study_chains(found)
        measured = Measured(Path(found.file), found, measure_run(found, study=study), (), study=study)
        return trace_figures(draw_chapters(measured))
    return what_if_figures(found) if isinstance(found, WhatIf) else comparison_figures(found)


def _styled(figure: Figure) -> "go.Figure":
    figures = load_extra("plotly.graph_objects")
    layout = {name: value for name, value in figure["layout"].items() if name != "meta"}
    return figures.Figure(
        data=[_coloured(trace) for trace in figure["data"]],
        layout={"template": "plotly_white", "hovermode": "closest", **layout},
    )


def _coloured(trace: Trace) -> dict[str, Any]:
    """Colour a trace as page.js does."""
    kept, look = {name: value for name, value in trace.items() if name != "meta"}, trace["meta"]
    own = slot_colour(look["slot"])
    if look["part"] == "band":
        return {**kept, "fillcolor": own + FAINT, "line": {**kept.get("line", {}), "color": "rgba(0,0,0,0)"}}
    if look["part"] == "line":
        line = {"color": own, "width": look["width"], "dash": look["dash"]}
        return {**kept, "line": {**kept.get("line", {}), **line}}
    shown = {"color": own, "opacity": 1, "symbol": "circle", **look}
    names = ("color", "opacity") if trace["type"] == "bar" else ("color", "size", "opacity", "symbol")
    marker = {name: shown[name] for name in names}
    errors = {"error_y": {**kept["error_y"], "color": own}} if "error_y" in kept else {}
    return {**kept, "marker": marker, **errors}
