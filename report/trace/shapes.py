"""Shape of the workload: a histogram on each axis of the agentic-workloads article."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from measure.metrics.results import Statistics
from measure.metrics.trace import shape_samples
from measure.wording import share
from report.pages.figures import axis, figure, five_digits, line
from report.pages.panels import Figure, Panel
from report.trace.measured import Measured
from tracefile.records.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of the article."""

    title: str
    x_title: str
    """With its unit."""
    sample: str
    """Counted thing, in the plural."""
    look: str
    divisor: float = 1.0


AXES: Final = {
    "turns": _Axis(
        "Turns per session",
        "requests of a session",
        "sessions",
        "A long tail holds cache for long: the mean says little.",
    ),
    "first_prompt_tokens": _Axis(
        "Input prompt",
        "prompt tokens of a session's first request",
        "sessions",
        "System prompt, tools and question: the part that sessions may share.",
    ),
    "appended_tokens": _Axis(
        "Tool or user tokens per turn",
        "tokens that a turn adds to the context",
        "turns",
        "New prefill of each turn, if all before is cached.",
    ),
    "pause_ms": _Axis(
        "Tool latency or think time",
        "end of a turn to the next request (s)",
        "pauses",
        "Blocks must outlive the pause to be hit: a long tail is evicted first.",
        1e3,
    ),
}
"""Axes that are drawn; the tables have every one."""
BINS: Final = 28
FEW: Final = 8
LOG_FROM: Final = 20.0
"""Spread (largest over smallest value above 0) from which an axis is logarithmic."""


def shape_panels(measured: Measured) -> list[Panel]:
    """Return a histogram of each axis that the trace has values of."""
    samples = shape_samples(measured.run)
    named = any(session is not None for session in measured.run.sessions)
    panels = []
    for name, drawn in AXES.items():
        found = measured.metrics.shape[name]
        if found is not None and (named or name != "turns"):
            values = samples[name][~np.isnan(samples[name])]
            # A pause below 1 ms is none: no axis begins at a microsecond for it.
            values = np.where(values > 0, np.maximum(values / drawn.divisor, 1 / drawn.divisor), values)
            panels.append(_panel(f"shape-{name.replace('_', '-')}", drawn, found, values))
    return panels or [Panel(title="Histograms", missing="The trace has no sessions and no lengths.")]


def _panel(place: str, drawn: _Axis, found: Statistics, values: FloatArray) -> Panel:
    zeros = int(np.count_nonzero(values == 0.0))
    edges, log = bins(values, whole=drawn.divisor == 1.0)
    at_zero = f" At 0, left of the axis: {share(zeros / len(values))}." if log and zeros >= 0.0005 * len(values) else ""
    caption = f"{found.n:,} {drawn.sample}.{at_zero} {drawn.look}"
    return Panel(
        title=drawn.title, id=place, figure=_histogram(drawn, found, values, edges, log=log), caption=caption, half=True
    )


def bins(values: FloatArray, *, whole: bool) -> tuple[FloatArray, bool]:
    """Return edges of a histogram, and True if they are even on a log axis; ``whole``: values are integers."""
    above = values[values > 0]
    largest = float(values.max())
    if len(above) and largest > LOG_FROM * float(above.min()):
        few = whole and above.min() < FEW  # bins of 1, 2, 3 … tokens are unlike wide
        count = int(np.ceil(np.log(largest / above.min()) / np.log(1.5))) if few else BINS
        edges = np.geomspace(float(above.min()), largest * 1.0001, min(count, BINS) + 1)
        if whole:
            edges = np.unique(np.ceil(edges - 1e-9))
            edges[-1] = np.floor(largest) + 1
        return edges, True
    smallest = float(values.min())
    if whole:
        step = max(1.0, np.ceil((largest - smallest + 1) / BINS))
        return np.arange(smallest, largest + step + 0.5, step) - 0.5, False
    return np.linspace(smallest, largest if largest > smallest else smallest + 1.0, BINS + 1), False


def _histogram(drawn: _Axis, found: Statistics, values: FloatArray, edges: FloatArray, *, log: bool) -> Figure:
    shares = np.histogram(values, edges)[0] / len(values)
    widths = np.diff(edges)
    bars = {
        "type": "bar",
        "name": f"share of {drawn.sample}",
        "x": [*map(five_digits, edges[:-1] + widths / 2)],
        "width": [*map(five_digits, widths)],
        "y": [*map(five_digits, shares)],
        "meta": {"slot": 6, "part": "points"},
        "showlegend": False,
        "hovertemplate": "%{y:.1%} near %{x:,.4~g}<extra></extra>",
    }
    top = float(shares.max()) * 1.04 or 1.0
    marks = {"median": (found.p50, 0, "solid"), "mean": (found.mean, 2, "5px,3px"), "p99": (found.p99, 4, "2px,3px")}
    lines = [
        line([x, x], [0.0, top], slot, dash=dash, name=f"{name} {_number(x)}", hoverinfo="name")
        for name, (value, slot, dash) in marks.items()
        if (x := value / drawn.divisor) > 0 or not log
    ]
    steps = {"dtick": 1} if drawn.divisor == 1.0 and edges[-1] - edges[0] <= 12 else {}
    x_axis = axis(drawn.x_title, **({"type": "log"} if log else steps))
    return figure([bars, *lines], x_axis, axis(f"of {drawn.sample}", tickformat=".0%", range=[0, top]), bargap=0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
