"""Comparisons from Python, and figures for a notebook in the colours of the pages."""

import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from report.compare.comparison import CompareConfig, Compared, compare
from report.pages.figures import Figure, Trace
from report.pages.forecastpages import what_if_figures
from report.pages.page import comparison_figures
from report.pages.whatif import WhatIf

FAINT = "2b"
"""Opacity of a band, in hexadecimal."""


def compare_traces(traces: Mapping[str, str | os.PathLike[str]], *, bootstrap: int = 500, seed: int = 0) -> Compared:
    """Compare traces by label, the first the truth of the others; ``result`` is what ``report compare --json`` prints.

    ``bootstrap``: draws for intervals, 0: none. One trace alone has its curves and no errors. Raises InputError.
    """
    paths = {label: Path(path) for label, path in traces.items()}
    return compare(CompareConfig(traces=paths, truths={}, repeats=(), seed=seed, bootstrap=bootstrap))


def draw(found: Compared | WhatIf) -> dict[str, go.Figure]:
    """Return the figures of a comparison or a forecast by name, such as ``survival-all``: TTFT in ms, log axis."""
    figures = what_if_figures(found) if isinstance(found, WhatIf) else comparison_figures(found)
    return {name: _styled(figure) for name, figure in figures.items()}


def _styled(figure: Figure) -> go.Figure:
    colours = palette()
    layout = {name: value for name, value in figure["layout"].items() if name != "meta"}
    return go.Figure(
        data=[_coloured(trace, colours) for trace in figure["data"]],
        layout={"template": "plotly_white", "hovermode": "closest", **layout},
    )


def palette() -> dict[str, str]:
    """Return the light colours of the pages by name, from their own style sheet."""
    css = files("report.pages").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+)", css.partition("}")[0]))


def _coloured(trace: Trace, colours: Mapping[str, str]) -> dict[str, Any]:
    """Colour a trace as page.js does."""
    kept, look = {name: value for name, value in trace.items() if name != "meta"}, trace["meta"]
    own = colours["muted"] if look["slot"] < 0 else colours[f"c{look['slot'] % 8}"]
    if look["part"] == "band":
        return {**kept, "fillcolor": own + FAINT, "line": {**kept.get("line", {}), "color": "rgba(0,0,0,0)"}}
    if look["part"] == "line":
        line = {"color": own, "width": look["width"], "dash": look["dash"]}
        return {**kept, "line": {**kept.get("line", {}), **line}}
    shown = {"color": own, "opacity": 1, "symbol": "circle", **look}
    marker = {name: shown[name] for name in ("color", "size", "opacity", "symbol")}
    errors = {"error_y": {**kept["error_y"], "color": own}} if "error_y" in kept else {}
    return {**kept, "marker": marker, **errors}
