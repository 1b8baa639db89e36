"""Figures of the pages drawn by matplotlib: the same data, colours of the light page, and no browser.

It draws the part of plotly's language that the pages use: lines, markers, bands, error bars, bars and text. A trace of
another type is an error, so that no figure silently lacks a part.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from report.images.palette import palette, slot_colour
from tracefile.records.arrays import FloatArray

Trace = Mapping[str, Any]

PIXELS_AN_INCH: Final = 100
"""Of plotly's pixels, in which heights, widths and sizes are given."""
WIDTH_PX: Final = 800
HEIGHT_PX: Final = 420
PNG_SCALE: Final = 2
"""Dots of a PNG for each pixel, for screens of such a density."""
FORMATS: Final[dict[str, tuple[float, dict[str, str | None]]]] = {
    "svg": (PIXELS_AN_INCH, {"Date": None, "Creator": "kvtape"}),
    "png": (PIXELS_AN_INCH * PNG_SCALE, {"Software": "kvtape"}),
}
"""Dots an inch and metadata by format: no date, so that equal figures are equal files."""
BAND_OPACITY: Final = 0.17
SYMBOLS: Final = {"circle": "o", "x": "x", "triangle-up": "^", "square": "s", "diamond": "D", "cross": "P", "star": "*"}
DASHES: Final = {"dash": "6px,3px", "dot": "2px,3px", "dashdot": "10px,3px,2px,3px"}
LUMINANCE: Final = (0.21, 0.72, 0.07)
"""Weights of red, green and blue."""
LIGHT: Final = 0.6
"""Luminance from which text on a colour is dark."""
_POINTS_A_PX: Final = 72 / PIXELS_AN_INCH
_SETTINGS: Final[dict[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": palette()["muted"],
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": True,
    "figure.constrained_layout.use": True,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "grid.color": palette()["line"],
    "grid.linewidth": 0.7,
    "path.simplify": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvtape",
    "text.color": palette()["ink"],
    "text.parse_math": False,
    "xtick.color": palette()["line"],
    "xtick.labelcolor": palette()["ink"],
    "ytick.color": palette()["line"],
    "ytick.labelcolor": palette()["ink"],
}


def draw_images(figure: Mapping[str, Any], suffixes: Sequence[str] = tuple(FORMATS)) -> dict[str, bytes]:
    """Return a page's figure by format; the same bytes for the same figure."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a label in a script that DejaVu Sans lacks
        canvas = _drawn(figure)
        written = {}
        for suffix in suffixes:
            dpi, metadata = FORMATS[suffix]
            file = io.BytesIO()
            canvas.savefig(file, format=suffix, dpi=dpi, metadata=metadata, facecolor=palette()["paper"])
            written[suffix] = file.getvalue()
    return written


def _drawn(figure: Mapping[str, Any]) -> Canvas:
    layout = figure["layout"]
    height_px = layout.get("height", HEIGHT_PX)
    canvas = Canvas(figsize=(WIDTH_PX / PIXELS_AN_INCH, height_px / PIXELS_AN_INCH))
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    plot = _Plot(axes, figure["data"], layout)
    shown: dict[str, Artist] = {}
    for number, trace in enumerate(figure["data"]):
        artist = plot.draw(number)
        artist.set_gid(f"trace-{number}")
        if trace.get("name") and trace.get("showlegend", True) and layout.get("showlegend", True):
            shown.setdefault(plain_text(trace["name"]), artist)
    shape_axes(axes, layout)
    plot.label_bars(canvas)
    for note in layout.get("annotations", ()):
        axes.annotate(plain_text(note["text"]), (note["x"], note["y"]), fontsize=8.5, ha="center", va="center")
    _add_legend(axes, shown)
    return canvas


class _Plot:
    """Traces of one figure on their axes; names of categories stand at 0, 1, … in order of appearance."""

    def __init__(self, axes: Axes, traces: Sequence[Trace], layout: Mapping[str, Any]) -> None:
        self._axes, self._traces, self._layout = axes, traces, layout
        self._places: dict[str, dict[str, int]] = {}
        for letter in LETTERS:
            names = [value for trace in traces for value in trace[letter] if isinstance(value, str)]
            self._places[letter] = {name: place for place, name in enumerate(dict.fromkeys(names))}
            if names:
                getattr(axes, f"set_{letter}ticks")(range(len(self._places[letter])), self._places[letter])
        self._ends: dict[float, float] = {}
        """Of stacked bars, by their place."""
        self._labelled: list[tuple[Rectangle, str]] = []
        """Bars with text inside."""

    def draw(self, number: int) -> Artist:
        """Draw a trace above those before it. Raises ValueError for one of a type that no page had so far."""
        trace = self._traces[number]
        order = 2 + number / len(self._traces)
        if trace["type"] == "bar":
            return self._bars(trace)
        if trace["type"] != "scatter":
            raise ValueError(f"{trace['type']}: no type of trace that an image can have")
        if trace["meta"]["part"] == "points":
            return self._points(trace, order)
        x, y = self._numbers(trace, "x"), self._numbers(trace, "y")
        colour, steps = slot_colour(trace["meta"]["slot"]), trace.get("line", {}).get("shape") == "hv"
        if trace["meta"]["part"] == "band":
            if trace.get("fill") != "tonexty":
                return self._axes.plot(x, y, linewidth=0.0, zorder=order)[0]
            low = self._numbers(self._traces[number - 1], "y")
            look: dict[str, Any] = {"alpha": BAND_OPACITY, "linewidth": 0, "step": "post" if steps else None}
            return self._axes.fill_between(x, low, y, color=colour, zorder=order, **look)
        width, dash = trace["meta"]["width"], trace["meta"]["dash"]
        return self._axes.plot(
            x,
            y,
            color=colour,
            linewidth=width * _POINTS_A_PX,
            linestyle=_dash(dash, width),
            drawstyle="steps-post" if steps else "default",
            zorder=order,
        )[0]

    def _points(self, trace: Trace, order: float) -> Artist:
        look, colour = trace["meta"], slot_colour(trace["meta"]["slot"])
        x, y = self._numbers(trace, "x"), self._numbers(trace, "y")
        if self._layout.get("scattermode") == "group":
            x = x + self._beside(trace, 1.0 - self._layout.get("scattergap", 0.2))[0]
        symbol = look.get("symbol", "circle")
        hollow = symbol.endswith("-open")
        marked: Artist = self._axes.plot(
            x,
            y,
            color=colour,
            linestyle="-" if "lines" in trace.get("mode", "") else "none",
            linewidth=look.get("width", 2.0) * _POINTS_A_PX,
            marker=SYMBOLS[symbol.removesuffix("-open")],
            markersize=look.get("size", 6) * _POINTS_A_PX,
            markerfacecolor="none" if hollow else colour,
            markeredgewidth=1.2 if hollow or symbol == "x" else 0.0,
            alpha=look.get("opacity", 1.0),
            zorder=order,
        )[0]
        for letter in LETTERS:
            error = trace.get(f"error_{letter}")
            if error is not None:
                reach: dict[str, Any] = {
                    f"{letter}err": [np.asarray(error[name], np.float64) for name in ("arrayminus", "array")]
                }
                self._axes.errorbar(x, y, **reach, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3, zorder=order)
        for text, *place in zip(trace.get("text", ()), x, y, strict=False):
            self._axes.annotate(
                plain_text(text), (place[0], place[1]), (5, 5), textcoords="offset points", fontsize=8.5, color=colour
            )  # fmt: skip
        return marked

    def _bars(self, trace: Trace) -> Artist:
        flat, mode = trace.get("orientation") == "h", self._layout.get("barmode", "group")
        places, sizes = (self._numbers(trace, letter) for letter in (("y", "x") if flat else ("x", "y")))
        shift, width = 0.0, 1.0 - self._layout.get("bargap", 0.2)
        if mode == "group":
            shift, width = self._beside(trace, width)
        base = [self._ends.get(place, 0.0) if mode in ("stack", "relative") else 0.0 for place in places.tolist()]
        drawn = (self._axes.barh if flat else self._axes.bar)(
            places + shift,
            sizes,
            trace.get("width", width),
            trace.get("base", base),
            color=slot_colour(trace["meta"]["slot"]),
            alpha=trace["meta"].get("opacity", 1.0),
            edgecolor=palette()["paper"],
            linewidth=0.5,
        )
        self._labelled += [(bar, text) for bar, text in zip(drawn.patches, trace.get("text", ()), strict=False) if text]
        self._ends |= {
            place: end + size for place, end, size in zip(places.tolist(), base, sizes.tolist(), strict=True)
        }
        return drawn.patches[0]

    def label_bars(self, canvas: Canvas) -> None:
        """Write the texts of bars that have room for them, once the axes have their place."""
        if self._labelled:
            canvas.draw_without_rendering()
        for bar, text in self._labelled:
            (left, low), (right, high) = bar.get_window_extent().get_points()
            x, y = self._axes.transData.inverted().transform(((left + right) / 2, (low + high) / 2))
            ink = palette()["paper" if np.dot(bar.get_facecolor()[:3], LUMINANCE) < LIGHT else "ink"]
            label = self._axes.text(x, y, plain_text(text), color=ink, fontsize=8, ha="center", va="center", zorder=9)
            size = label.get_window_extent()
            if size.width > abs(right - left) or size.height > abs(high - low):
                label.remove()

    def _beside(self, trace: Trace, width: float) -> tuple[float, float]:
        """Return a trace's distance from its category's middle, and its width, beside others of its type."""
        same = [one for one in self._traces if one["type"] == trace["type"]]
        number = next(place for place, one in enumerate(same) if one is trace)
        return (number - (len(same) - 1) / 2) * width / len(same), width / len(same)

    def _numbers(self, trace: Trace, letter: str) -> FloatArray:
        """Return numbers and places of categories; unknown ones are NaN."""
        places = self._places[letter]
        values = [math.nan if value is None else places.get(value, value) for value in trace[letter]]
        return np.asarray(values, np.float64)


def _dash(dash: str, width_px: float) -> Any:
    """Return plotly's dash, in pixels, as matplotlib's, in widths of the line."""
    if dash == "solid":
        return "-"
    lengths = [float(word.removesuffix("px")) / width_px for word in DASHES.get(dash, dash).split(",")]
    return 0, tuple(lengths)


def _add_legend(axes: Axes, shown: Mapping[str, Artist]) -> None:
    """Put the names above the axes in as many columns as fit."""
    if not shown:
        return
    widest = max(map(len, shown)) * 5.6 + 44
    columns = max(1, min(len(shown), int(WIDTH_PX * _POINTS_A_PX * 0.92 // widest)))
    # The library fills column after column; names are read row after row.
    names = [name for column in range(columns) for name in list(shown)[column::columns]]
    legend = axes.legend(
        [shown[name] for name in names],
        [str(number) for number in range(len(shown))],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.3,
        handlelength=2.6,
        columnspacing=1.4,
    )
    # A name that begins with an underscore would be left out if it were given above.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


Layout = Mapping[str, Any]
LETTERS: Final = ("x", "y")
_FORMAT: Final = re.compile(r"(?P<sign>\+?)(?P<comma>,?)(?:\.(?P<digits>\d+))?(?P<trim>~?)(?P<kind>[%dfgs]?)")


def shape_axes(axes: Axes, layout: Layout) -> None:
    """Give both axes their titles, scales, ranges and ticks, after all data is drawn."""
    for letter, axis in zip(LETTERS, (axes.xaxis, axes.yaxis), strict=True):
        given = layout.get(f"{letter}axis", {})
        axis.set_label_text(plain_text(given.get("title", {}).get("text", "")), color=palette()["muted"])
        log = layout.get("meta", {}).get("log", {}).get(f"{letter}axis")
        if given.get("type") == "log" and log:
            _scale_log(axes, axis, letter, log)
        else:
            _scale_linear(axes, axis, letter, given)
    if layout.get("yaxis", {}).get("zeroline"):
        axes.axhline(0.0, color=palette()["muted"], linewidth=0.8, zorder=1)


def _scale_log(axes: Axes, axis: Axis, letter: str, log: Layout) -> None:
    getattr(axes, f"set_{letter}scale")("log")
    low, high = log["range"]
    getattr(axes, f"set_{letter}lim")(10.0**low, 10.0**high)
    axis.set_major_locator(FixedLocator(log["at"]))
    axis.set_major_formatter(_listed(log["at"], log[letter]))
    axis.set_minor_locator(NullLocator())


def _scale_linear(axes: Axes, axis: Axis, letter: str, given: Layout) -> None:
    if "tickvals" in given:
        axis.set_major_locator(FixedLocator(given["tickvals"]))
        axis.set_major_formatter(_listed(given["tickvals"], given.get("ticktext", given["tickvals"])))
    elif given.get("type") != "category":
        axis.set_major_locator(MaxNLocator(nbins=given.get("nticks", 7), steps=[1, 2, 5, 10]))
        reading = number_format(given.get("tickformat", ""))
        axis.set_major_formatter(FuncFormatter(lambda value, _: reading(value)))
    if "range" in given:
        getattr(axes, f"set_{letter}lim")(*given["range"])
    elif given.get("rangemode") == "tozero":
        getattr(axes, f"set_{letter}lim")(**{"bottom" if letter == "y" else "left": 0.0})
    if given.get("autorange") == "reversed" and not axis.get_inverted():
        axis.set_inverted(True)


def _listed(places: list[float], texts: list[str]) -> FuncFormatter:
    """Return the labels of fixed ticks."""

    def label(value: float, _: int | None = None) -> str:
        nearest = min(range(len(places)), key=lambda place: abs(places[place] - value))
        return plain_text(str(texts[nearest]))

    return FuncFormatter(label)


def number_format(d3: str) -> Callable[[float], str]:
    """Return the reading of a d3 format as the pages use it: ``.0%``, ``+.1%``, ``.3~%``, ``,d``, ``,.1f``."""
    found = _FORMAT.fullmatch(d3)
    if found is None:
        raise ValueError(f"{d3}: not a number format that an image can have")
    kind, comma, sign, trim = (found[name] for name in ("kind", "comma", "sign", "trim"))
    digits = None if found["digits"] is None else int(found["digits"])

    def read(value: float) -> str:
        if kind == "%":
            scaled = round(value * 100, 9)
            text = _trimmed(f"{scaled:.{digits or 0}f}") if trim else f"{scaled:.{digits or 0}f}"
            text += "%"
        elif kind == "d" or not d3:
            text = f"{round(value, 9):,.10g}"
        else:
            text = f"{value:{comma}.{3 if digits is None else digits}{kind or 'g'}}"
        return f"+{text}" if sign and value > 0 else text.replace("-", "−")

    return read


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_text(text: str) -> str:
    """Return text without plotly's markup: a line break stays one."""
    return re.sub(r"<[^>]+>", "", re.sub(r"<br\s*/?>", "\n", text))
