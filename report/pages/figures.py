"""Figures of latency, throughput and cache size, in plotly without colours: the page adds light or dark colours.

The ``meta`` of a trace has its ``slot`` (index of the label, which selects its colour) and its ``part`` (line, band or
points). Solid lines are measured, dashed lines predicted; a reference is thick.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from measure import number_format
from report.pages.panels import Figure
from tracefile.records.arrays import FloatArray

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency survival curve: share of requests still waiting after each time, with its band (NaN: none)."""

    time_ms: FloatArray
    survival: FloatArray
    low: FloatArray
    high: FloatArray


DASHED: Final = "6px,3px"


def line(x: list[Any], y: list[Any], slot: int, *, width: float = 2.2, dash: str = "solid", **more: Any) -> Trace:
    meta = {"slot": slot, "part": "line", "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "meta": meta, **more}


def points(x: list[Any], y: list[Any], slot: int, style: Mapping[str, Any], **more: Any) -> Trace:
    meta = {"slot": slot, "part": "points", **style}
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "meta": meta, **more}


def band(x: list[Any], low: list[Any], high: list[Any], slot: int, **more: Any) -> list[Trace]:
    hidden = {"hoverinfo": "skip", "showlegend": False, "meta": {"slot": slot, "part": "band"}, **more}
    return [
        {"type": "scatter", "mode": "lines", "x": x, "y": edge, "fill": fill, **hidden}
        for edge, fill in ((low, "none"), (high, "tonexty"))
    ]


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def figure(data: list[Trace], xaxis: dict[str, Any], yaxis: dict[str, Any], **layout: Any) -> Figure:
    """Return a figure of ``data``; its ``meta`` holds the scale of each log axis."""
    scales = {}
    for name, spec in (("xaxis", xaxis), ("yaxis", yaxis)):
        values = [value for trace in data for value in trace.get(name[0], ()) if _is_positive(value)]
        if values and spec.get("type") == "log":
            scales[name] = log_scale(min(values), max(values), percent="%" in spec.get("tickformat", ""))
    return {"data": data, "layout": {"xaxis": xaxis, "yaxis": yaxis, "meta": scales, **layout}}


LABEL_GAPS: Final = {"wide": 0.045, "narrow": 0.12}
"""Least distance of two labels, as a share of the axis: on a screen, and on half of it or a phone."""


def log_scale(low: float, high: float, *, percent: bool = False) -> dict[str, Any]:
    """Return range, ticks and labels of a log axis (latency, tokens); the first tick is at its start.

    Each decade has ticks at 1, 2 and 5; shorter ranges have even steps. Overlapping labels are left out.
    """
    ticks = _log_ticks(low, high)
    logs = np.log10(ticks)
    texts = [_tick_text(tick * 100 if percent else tick, 100 if percent else ticks[-1]) for tick in ticks]
    labels = {
        name: [
            f"{text}{'%' * percent}" if shown else "" for text, shown in zip(texts, _labelled(logs, gap), strict=True)
        ]
        for name, gap in LABEL_GAPS.items()
    }
    # plotly leaves out the label of a tick exactly at the axis's end.
    end = float(logs[-1] + 0.004 * (logs[-1] - logs[0]))
    return {"range": [float(logs[0]), end], "at": ticks, **labels}


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks from the last one at or below ``low`` to the first one at or above ``high``."""
    step = 10.0 ** np.floor(np.log10(max(high - low, 0.01 * high) / 4))
    step *= next(digit for digit in (1, 2, 5, 10) if digit * step * 6 >= high - low)
    even = [float(f"{index * step:.12g}") for index in range(int(low // step), int(-(-high // step)) + 1)]
    if high < 10 * low and even[0] > 0:
        return even if len(even) > 1 else [even[0], even[0] + step]
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(tick for tick in ticks if tick <= low * (1 + 1e-9))
    last = min(tick for tick in ticks if tick >= high * (1 - 1e-9))
    return [tick for tick in ticks if first <= tick <= last]


def _labelled(logs: FloatArray, gap: float) -> list[bool]:
    """Return whether each tick has a label: the first, then powers of ten, then others, ``gap`` apart."""
    shares = (logs - logs[0]) / (logs[-1] - logs[0])
    labelled: list[int] = []
    for number in sorted(range(len(logs)), key=lambda number: (number > 0, logs[number] % 1 > 1e-9)):
        if all(abs(shares[number] - shares[other]) >= gap for other in labelled):
            labelled.append(number)
    return [number in labelled for number in range(len(logs))]


def _tick_text(tick: float, largest: float) -> str:
    return number_format.round_number(tick) if largest >= 100_000 else f"{tick:,.10g}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Latency survival curve of a label in a figure."""

    name: str
    curve: Curve
    n: int | None = None
    """Latencies in the sample. None: named in the caption."""
    slot: int
    width: float = 2.2
    dash: str = "solid"


def survival_figure(curves: Sequence[Survival], x_title: str, y_title: str) -> Figure:
    """Draw latency survival curves and bands; the first are below, so that wide curves hide no equal curve."""
    start_ms = max(0.8 * min((float(curve.curve.time_ms[0]) for curve in curves), default=1.0), 1e-3)
    bands, lines = list[Trace](), list[Trace]()
    for curve in curves:
        x, named = [round_finite(start_ms), *rounded(curve.curve.time_ms)], dict[str, Any](legendgroup=curve.name)
        y, low, high = ([1.0, *rounded(edge)] for edge in (curve.curve.survival, curve.curve.low, curve.curve.high))
        if not np.isnan(curve.curve.low).all():
            bands += band(x, low, high, curve.slot, line={"shape": "hv", "width": 0}, **named)
        count = "" if curve.n is None else f" (n = {curve.n:,})"
        hover = f"{plain(curve.name)}: %{{y:.1%}} beyond %{{x:,.1f}} ms{count}<extra></extra>"
        style = named | {"name": curve.name, "line": {"shape": "hv"}, "hovertemplate": hover}
        lines.append(line(x, y, curve.slot, width=curve.width, dash=curve.dash, **style))
    y_axis = axis(y_title, tickformat=".3~%", range=[0, 1.02])
    return figure([*bands, *lines], axis(x_title, type="log"), y_axis)


def rounded(values: FloatArray | npt.NDArray[np.int64]) -> list[float | None]:
    return [round_finite(float(value)) for value in values]


def round_finite(value: float) -> float | None:
    return five_digits(value) if np.isfinite(value) else None


def five_digits(value: float) -> float:
    """Round to five digits: finer than a pixel, half the page size."""
    return float(f"{value:.5g}")


def plain(text: str) -> str:
    """A label inside plotly's own markup, which reads angle brackets and percent braces."""
    return text.replace("<", "‹").replace(">", "›").replace("{", "(").replace("}", ")")
