"""A page's axes in matplotlib: scales, ranges, ticks and number formats as plotly has them."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from report.images.palette import palette

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
