"""The pictures, as plotly figures without colours: the page gives each label its colour, light or dark.

A trace's ``meta`` says what it is: ``slot`` (the label's place in the order given, which picks its colour everywhere)
and ``part`` (line, band or points). Solid lines are measured, dashed ones predicted; a truth is drawn thick.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from measure import wording
from measure.cohorts import ALL, MAIN, cohort_order
from measure.runs import UNKNOWN
from measure.survival import CENSORED
from measure.waits import first_token_waits
from report.compare.cells import Cell, Curve
from report.compare.comparison import Compared
from report.compare.results import LEVELS, Metric
from tracefile.records.arrays import FloatArray, IntArray

Figure = dict[str, Any]
Trace = dict[str, Any]

DASHED: Final = "6px,3px"
_MOST_POINTS: Final = 2_000
"""Points of a scatter per label; more are thinned evenly, since a page has to open on a phone."""


def line(x: list[Any], y: list[Any], slot: int, *, width: float = 2.2, dash: str = "solid", **more: Any) -> Trace:
    meta = {"slot": slot, "part": "line", "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "meta": meta, **more}


def points(x: list[Any], y: list[Any], slot: int, look: Mapping[str, Any], **more: Any) -> Trace:
    """Draw markers; ``look``: size, symbol, opacity."""
    meta = {"slot": slot, "part": "points", **look}
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "meta": meta, **more}


def band(x: list[Any], low: list[Any], high: list[Any], slot: int, **more: Any) -> list[Trace]:
    """Draw the lower edge, then the upper one filled down to it."""
    hidden = {"hoverinfo": "skip", "showlegend": False, "meta": {"slot": slot, "part": "band"}, **more}
    return [
        {"type": "scatter", "mode": "lines", "x": x, "y": edge, "fill": fill, **hidden}
        for edge, fill in ((low, "none"), (high, "tonexty"))
    ]


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def figure(data: list[Trace], xaxis: dict[str, Any], yaxis: dict[str, Any], **layout: Any) -> Figure:
    """Return a figure of ``data``; ``meta.log`` holds each axis's log scale, which the page uses while it is on."""
    scales = {}
    for name, own in (("xaxis", xaxis), ("yaxis", yaxis)):
        values = [value for trace in data for value in trace.get(name[0], ()) if _is_positive(value)]
        if values:
            scales[name] = log_scale(min(values), max(values), percent="%" in own.get("tickformat", ""))
    return {"data": data, "layout": {"xaxis": xaxis, "yaxis": yaxis, "meta": {"log": scales}, **layout}}


LABEL_GAPS: Final = {"x": 0.045, "half": 0.095, "narrow": 0.17, "y": 0.065}
"""Least distance of two labels, as a share of the axis: horizontal on a screen, on half of it, on a phone; vertical."""


def log_scale(low: float, high: float, *, percent: bool = False) -> dict[str, Any]:
    """Return range, ticks and labels of a log axis from ``low`` to ``high``: the first tick stands at its beginning.

    Every decade has a tick at 1, 2 and 5, below a decade there are even steps. Labels that would overlap are left out.
    """
    ticks = _log_ticks(low, high)
    places = np.log10(ticks)
    texts = [_tick_text(tick * 100 if percent else tick, 100 if percent else ticks[-1]) for tick in ticks]
    unit = "%" if percent else ""
    labels = {
        name: [f"{text}{unit}" if kept else "" for text, kept in zip(texts, _labelled(ticks, gap), strict=True)]
        for name, gap in LABEL_GAPS.items()
    }
    # plotly leaves out the label of a tick exactly at the axis's end.
    end = float(places[-1] + 0.004 * (places[-1] - places[0]))
    return {"range": [float(places[0]), end], "at": ticks, **labels}


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks from the last one at or below ``low`` to the first one at or above ``high``."""
    step = 10.0 ** np.floor(np.log10(max(high - low, 0.01 * high) / 4))
    step *= next(digit for digit in (1, 2, 5, 10) if digit * step * 6 >= high - low)
    even = [float(f"{place * step:.12g}") for place in range(int(low // step), int(-(-high // step)) + 1)]
    if high < 10 * low and even[0] > 0:
        return even if len(even) > 1 else [even[0], even[0] + step]
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(tick for tick in ticks if tick <= low * (1 + 1e-9))
    last = min(tick for tick in ticks if tick >= high * (1 - 1e-9))
    return [tick for tick in ticks if first <= tick <= last]


def _labelled(ticks: Sequence[float], gap: float) -> list[bool]:
    """Return whether each tick has a label: the first, then powers of ten, then others, ``gap`` apart."""
    logs = np.log10(ticks)
    places = (logs - logs[0]) / (logs[-1] - logs[0])
    kept: list[int] = []
    for number in sorted(range(len(ticks)), key=lambda number: (number > 0, np.log10(ticks[number]) % 1 > 1e-9)):
        if all(abs(places[number] - places[other]) >= gap for other in kept):
            kept.append(number)
    return [number in kept for number in range(len(ticks))]


def _tick_text(tick: float, largest: float) -> str:
    return wording.round_number(tick) if largest >= 100_000 else f"{tick:,.10g}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < np.inf


def survival_figures(compared: Compared) -> dict[str, Figure]:
    cohorts = {cohort for (_, cohort, metric) in compared.cells if metric == "ttft" and cohort in MAIN}
    return {
        cohort: _curves(compared, cohort, "ttft", "TTFT (ms)", "still without a first token")
        for cohort in cohort_order(cohorts)
    }


def gap_figure(compared: Compared) -> Figure | None:
    """Survival of inter-token gaps; None if no trace has any."""
    curves = _curves(compared, ALL, "itl", "inter-token gap (ms)", "share of gaps that are longer")
    return curves if curves["data"] else None


def error_figure(compared: Compared, cohort: str) -> Figure | None:
    """Signed quantile errors of TTFT with their intervals; None if no pair is judged in this cohort."""
    slots = _slots(compared)
    data: list[Trace] = []
    for label, pair in compared.result.pairs.items():
        cell = pair.cohorts.get(cohort)
        if pair.kind != "error" or cell is None or not cell.ttft.judged:
            continue
        found = {level: getattr(cell.ttft, level) for level in LEVELS}
        shown = {level: error for level, error in found.items() if error is not None and error.reached == "both"}
        data.append(
            points(
                list(shown),
                [_round(error.signed_error) for error in shown.values()],
                slots[label],
                {"size": 9},
                name=f"{label} / {pair.truth}",
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [_reach(error.high, error.signed_error) for error in shown.values()],
                    "arrayminus": [_reach(error.signed_error, error.low) for error in shown.values()],
                    "thickness": 1.6,
                    "width": 5,
                },
                hovertemplate="%{fullData.name}, %{x}: %{y:+.1%}<extra></extra>",
            )
        )
    y_axis = axis("TTFT error", tickformat="+.0%", zeroline=True)
    return figure(data, {"type": "category"}, y_axis, scattermode="group", scattergap=0.5) if data else None


def cached_figure(compared: Compared) -> Figure | None:
    """Cached tokens of each joined request, the truth's against the other's; None if nothing is reported."""
    slots = _slots(compared)
    data: list[Trace] = []
    smallest, largest = np.inf, 0
    for label, pair in compared.result.pairs.items():
        join = compared.joins[label]
        t = compared.runs[pair.truth].cached_tokens[join.truth_rows]
        o = compared.runs[label].cached_tokens[join.other_rows]
        reported = (t != UNKNOWN) & (o != UNKNOWN)
        if pair.kind != "error" or not reported.any():
            continue
        t, o = t[reported], o[reported]
        smallest, largest = min(smallest, int(t.min()), int(o.min())), max(largest, int(t.max()), int(o.max()))
        kept = thinned(len(t))
        data.append(
            points(
                t[kept].tolist(),
                o[kept].tolist(),
                slots[label],
                {"size": 6, "opacity": 0.55},
                name=f"{label} / {pair.truth}",
                hovertemplate="%{fullData.name}: %{y:,} for %{x:,} tokens<extra></extra>",
            )
        )
    if not data:
        return None
    margin = max(0.05 * (largest - smallest), 1.0)
    ends = [smallest - margin, largest + margin]
    diagonal = line(ends, ends, -1, width=1, hoverinfo="skip", showlegend=False)
    x_axis, y_axis = (
        axis(f"cached tokens, {side}", range=ends, tickformat=",d", nticks=6) for side in ("truth", "label")
    )
    return figure([diagonal, *data], x_axis, y_axis)


def arrival_figure(compared: Compared) -> Figure:
    """TTFT over arrival time, where saturation shows as a rise; censored waits are open triangles."""
    slots = _slots(compared)
    data: list[Trace] = []
    for label, run in compared.runs.items():
        waits = first_token_waits(run, np.arange(len(run)))
        arrival_s = (run.arrival_ms[waits.row] - np.nanmin(run.arrival_ms, initial=np.inf)) / 1e3
        for censored in (False, True):
            chosen = np.flatnonzero(((waits.end == CENSORED) == censored) & ~np.isnan(arrival_s))
            if not len(chosen):
                continue
            kept = chosen[np.argsort(arrival_s[chosen], kind="stable")][thinned(len(chosen))]
            data.append(
                points(
                    _rounded(arrival_s[kept]),
                    _rounded(waits.time_ms[kept]),
                    slots[label],
                    {
                        "size": 8 if censored else 5,
                        "opacity": 0.6,
                        "symbol": "triangle-up-open" if censored else "circle",
                    },
                    name=f"{label}, censored" if censored else label,
                    legendgroup=label,
                    showlegend=not censored,
                    hovertemplate="%{fullData.name}: %{y:,.1f} ms at %{x:,.1f} s<extra></extra>",
                )
            )
    return figure(data, axis("arrival after the first request (s)"), axis("TTFT (ms)", type="log"))


def _curves(compared: Compared, cohort: str, metric: Metric, x_title: str, y_title: str) -> Figure:
    cells = {
        label: compared.cells[label, cohort, metric]
        for label in compared.runs
        if (label, cohort, metric) in compared.cells and len(compared.cells[label, cohort, metric].waits)
    }
    slots = _slots(compared)
    start_ms = 0.8 * min((float(cell.curve.time_ms[0]) for cell in cells.values()), default=1.0)
    start_ms = max(start_ms, 1e-3)
    bands = [
        trace for label, cell in cells.items() for trace in survival_band(label, cell.curve, slots[label], start_ms)
    ]
    lines = [_line(compared, label, cell, slots[label], start_ms) for label, cell in cells.items()]
    y_axis = axis(y_title, tickformat=".3~%", range=[0, 1.02])
    return figure([*bands, *lines], axis(x_title, type="log"), y_axis)


def _line(compared: Compared, label: str, cell: Cell, slot: int, start_ms: float) -> Trace:
    judges = label in {pair.truth for pair in compared.result.pairs.values()}
    predicted = compared.runs[label].meta.source == "sim"
    look = {"width": 3.4 if judges else 2.2, "dash": DASHED if predicted else "solid"}
    return survival_line(label, cell.curve, len(cell.waits), slot, start_ms, **look)


def survival_line(name: str, curve: Curve, n: int, slot: int, start_ms: float, **look: Any) -> Trace:
    """Draw a curve from ``start_ms`` on, a log axis's begin; ``n``: waits in the sample."""
    return line(
        [_round(start_ms), *_rounded(curve.time_ms)],
        [1.0, *_rounded(curve.survival)],
        slot,
        name=name,
        legendgroup=name,
        line={"shape": "hv"},
        hovertemplate=f"{plain(name)}: %{{y:.1%}} beyond %{{x:,.1f}} ms (n = {n:,})<extra></extra>",
        **look,
    )


def survival_band(name: str, curve: Curve, slot: int, start_ms: float) -> list[Trace]:
    """Draw a curve's band; none if it has none."""
    if np.isnan(curve.low).all():
        return []
    x = [_round(start_ms), *_rounded(curve.time_ms)]
    low, high = ([1.0, *_rounded(edge)] for edge in (curve.low, curve.high))
    return band(x, low, high, slot, legendgroup=name, line={"shape": "hv", "width": 0})


def _slots(compared: Compared) -> dict[str, int]:
    return {label: slot for slot, label in enumerate(compared.runs)}


def thinned(n: int, most: int = _MOST_POINTS) -> IntArray:
    """Return places of at most ``most`` of n values, evenly."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _reach(far: float | None, near: float | None) -> float:
    return _round(far - near) or 0.0 if far is not None and near is not None else 0.0


def _rounded(values: FloatArray | npt.NDArray[np.int64]) -> list[float | None]:
    return [_round(float(value)) for value in values]


def _round(value: float) -> float | None:
    return five_digits(value) if np.isfinite(value) else None


def five_digits(value: float) -> float:
    """Return a number for a page: more digits than a screen has pixels, and half the page's size."""
    return float(f"{value:.5g}")


def plain(text: str) -> str:
    """A label inside plotly's own markup, which reads angle brackets and percent braces."""
    return text.replace("<", "‹").replace(">", "›").replace("{", "(").replace("}", ")")
