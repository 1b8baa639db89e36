"""A cache's numbers, read from JSON of ``sim curve``, ``sim misses`` and ``sim reuse``, as one page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, TypeVar

import msgspec
import numpy as np

from report.pages.figures import DASHED, Figure, Trace, axis, band, line
from report.pages.page import render
from tracefile.records.errors import InputError

File = TypeVar("File")


class OneCurve(msgspec.Struct, frozen=True):
    """Hits by cache size at one block size."""

    block_size: int
    input_tokens: int
    sizes: list[int]
    """In blocks."""
    hit_tokens: list[float]
    hit_tokens_low: list[float] = []
    hit_tokens_high: list[float] = []


class CurveFile(msgspec.Struct, frozen=True, tag_field="kind", tag="curve"):
    """Result of ``sim curve``."""

    trace: str
    curves: list[OneCurve]


class CauseShare(msgspec.Struct, frozen=True):
    """Prompt tokens of some requests, by cause."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]


class MissesFile(msgspec.Struct, frozen=True, tag_field="kind", tag="misses"):
    """Result of ``sim misses``."""

    trace: str
    block_size: int
    usable_blocks: int | None
    """Null: unlimited."""
    total: CauseShare
    cohorts: list[CauseShare]
    by: str | None
    groups: list[CauseShare]
    evictions: list[list[int]]


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution, at the file's levels."""

    count: int
    quantiles: list[float]


class WorkingSet(msgspec.Struct, frozen=True):
    """Blocks touched in an interval of time."""

    start_ms: float
    distinct_blocks: int
    seen_blocks: int


class ReuseFile(msgspec.Struct, frozen=True, tag_field="kind", tag="reuse"):
    """Result of ``sim reuse``."""

    trace: str
    block_size: int
    levels: list[float]
    time_ms: Quantiles
    distance_blocks: Quantiles
    window_ms: float
    windows: list[WorkingSet]


@dataclass(slots=True)
class CurveFiles:
    """Everything to draw, each with its label."""

    curves: dict[str, CurveFile] = field(default_factory=dict)
    misses: dict[str, MissesFile] = field(default_factory=dict)
    reuses: dict[str, ReuseFile] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys([*self.curves, *self.misses, *self.reuses]))


def read_curve_files(arguments: Sequence[str]) -> CurveFiles:
    """Read ``[LABEL=]FILE`` each; the label is the trace's name if none is given. Raises InputError."""
    found = CurveFiles()
    for argument in arguments:
        given, equals, path = argument.partition("=")
        labelled = bool(equals) and "/" not in given
        file = _read(Path(path if labelled else argument))
        label = given if labelled else PurePath(file.trace).name
        if isinstance(file, CurveFile):
            _add(found.curves, label, file, argument)
        elif isinstance(file, MissesFile):
            _add(found.misses, label, file, argument)
        else:
            _add(found.reuses, label, file, argument)
    return found


def _add(files: dict[str, File], label: str, file: File, argument: str) -> None:
    if not label or label in files:
        raise InputError(
            f"{argument}: label {label!r} is given twice or empty; expected LABEL=FILE with one of its own"
        )
    files[label] = file


def _read(path: Path) -> CurveFile | MissesFile | ReuseFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CurveFile | MissesFile | ReuseFile)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected what sim curve, misses or reuse prints with --json") from None


MOST_POINTS: Final = 600
"""Of one line; more are thinned, evenly on the log axis."""


def render_curves(files: CurveFiles) -> str:
    figures = {
        "hits": hits_figure(files),
        "misses": misses_figure(files),
        "distance": _reuse_figure(files, "distance (tokens of different blocks)", _distance_tokens),
        "time": _reuse_figure(files, "time until asked for again (s)", _time_s),
        "working-set": working_set_figure(files),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    return render("curve.html.jinja", drawn, files=files)


def hits_figure(files: CurveFiles) -> Figure | None:
    """Hit rate by cache size; None without a curve that hits anything."""
    data: list[Trace] = []
    slot = 0
    for label, file in files.curves.items():
        for curve in file.curves:
            name = f"{label}, {curve.block_size}-token blocks" if len(file.curves) > 1 else label
            if curve.sizes:
                data += _hits_lines(name, curve, slot)
            slot += 1
    return _lines(data, "cache (tokens)", "hit tokens of prompt tokens")


def misses_figure(files: CurveFiles) -> Figure | None:
    """Prompt tokens by cause as stacked bars: each file's whole, its cohorts if there are several, its groups."""
    bars: list[tuple[str, CauseShare]] = []
    for label, file in files.misses.items():
        shares = [file.total, *(file.cohorts if len(file.cohorts) > 1 else []), *file.groups]
        bars += [(f"{label}: {share.name}", share) for share in shares if share.input_tokens]
    if not bars:
        return None
    names = [name for name, _ in bars]
    data: list[Trace] = [
        {
            "type": "bar",
            "name": cause.replace("_", " "),
            "x": names,
            "y": [round(share.tokens[cause] / share.input_tokens, 6) for _, share in bars],
            "meta": {"slot": slot, "part": "points"},
            "hovertemplate": "%{x}, %{fullData.name}: %{y:.2%}<extra></extra>",
        }
        for slot, cause in enumerate(bars[0][1].tokens)
    ]
    axes = {"xaxis": {"type": "category"}, "yaxis": axis("of prompt tokens", tickformat=".0%")}
    return {"data": data, "layout": {"barmode": "stack", **axes}}


def working_set_figure(files: CurveFiles) -> Figure | None:
    data: list[Trace] = []
    for slot, (label, file) in enumerate(files.reuses.items()):
        last = len(file.windows) - 1
        windows = [
            file.windows[place] for place in np.unique(np.linspace(0, last, MOST_POINTS).astype(int)) if last >= 0
        ]
        x = [round(window.start_ms / 1e3, 3) for window in windows]
        touched = [window.distinct_blocks * file.block_size for window in windows]
        seen = [window.seen_blocks * file.block_size for window in windows]
        data.append(_line(f"{label}, in {file.window_ms / 1e3:g} s", x, touched, slot))
        data.append(_line(f"{label}, since the beginning", x, seen, slot, DASHED))
    figure = _lines([trace for trace in data if trace["x"]], "time (s)", "different tokens touched")
    if figure is not None:
        figure["layout"]["xaxis"]["type"] = "linear"
        figure["layout"]["yaxis"] = axis("different tokens touched", rangemode="tozero")
    return figure


def _hits_lines(name: str, curve: OneCurve, slot: int) -> Iterator[Trace]:
    places = np.unique(np.geomspace(1, len(curve.sizes), MOST_POINTS).astype(int)) - 1
    x = [curve.sizes[place] * curve.block_size for place in places]
    low, middle, high = (
        [round(edge[place] / (curve.input_tokens or 1), 6) for place in places] if edge else []
        for edge in (curve.hit_tokens_low, curve.hit_tokens, curve.hit_tokens_high)
    )
    if low and high:
        yield from band(x, low, high, slot, name=name, line={"shape": "hv"})
    yield _line(name, x, middle, slot)


def _reuse_figure(files: CurveFiles, x_title: str, values: Callable[[ReuseFile], list[float]]) -> Figure | None:
    """The share of accesses again that come at x or sooner."""
    data = [
        # A log axis has no zero: what comes at once stands at its left end.
        _line(label, [max(value, 1e-3) for value in values(file)], [round(level, 4) for level in file.levels], slot)
        for slot, (label, file) in enumerate(files.reuses.items())
        if file.time_ms.count
    ]
    return _lines(data, x_title, "of accesses again")


def _distance_tokens(file: ReuseFile) -> list[float]:
    return [value * file.block_size for value in file.distance_blocks.quantiles]


def _time_s(file: ReuseFile) -> list[float]:
    return [round(value / 1e3, 6) for value in file.time_ms.quantiles]


def _line(name: str, x: list[float], y: list[float], slot: int, dash: str = "solid") -> Trace:
    hover = "%{fullData.name}: %{y:,} at %{x:,}<extra></extra>"
    return line(x, y, slot, dash=dash, name=name, line={"shape": "hv"}, hovertemplate=hover)


def _lines(data: list[Trace], x_title: str, y_title: str) -> Figure | None:
    axes = {
        "xaxis": axis(x_title, type="log"),
        "yaxis": axis(y_title, tickformat=".0%", rangemode="tozero"),
    }
    return {"data": data, "layout": axes} if data else None
