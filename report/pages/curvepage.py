"""A cache's numbers, read from JSON of ``sim curve``, ``sim misses`` and ``sim reuse``, as one page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, TypeVar

import msgspec
import numpy as np

from measure import wording
from measure.cacheuse import CacheUse, CauseShare, Distribution, PolicyHits, Window
from report.pages.figures import DASHED, Figure, Trace, axis, band, figure, line, plain
from report.pages.page import render
from tracefile.records.decoding import NOT_JSON
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
    use: list[CacheUse] = []
    policies: list[PolicyHits] = []
    """Of eviction, requests one at a time; empty: not asked for."""
    kv_bytes_per_token: int | None = None
    """Null: not told, and no size is shown in GiB."""

    def size_text(self, tokens: int) -> str:
        return wording.cache_size(tokens, self.kv_bytes_per_token)


class CurveFile(msgspec.Struct, frozen=True, tag_field="kind", tag="curve"):
    """Result of ``sim curve``."""

    trace: str
    curves: list[OneCurve]


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

    @property
    def shares(self) -> list[CauseShare]:
        """The whole, its cohorts if there are several, its groups; without rows of no tokens."""
        rows = [self.total, *(self.cohorts if len(self.cohorts) > 1 else []), *self.groups]
        return [share for share in rows if share.input_tokens]


class ReuseFile(msgspec.Struct, frozen=True, tag_field="kind", tag="reuse"):
    """Result of ``sim reuse``."""

    trace: str
    block_size: int
    levels: list[float]
    time_ms: Distribution
    distance_blocks: Distribution
    window_ms: float
    windows: list[Window]


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
    except NOT_JSON as error:
        raise InputError(f"{path}: {error}; expected what sim curve, misses or reuse prints with --json") from None


MOST_POINTS: Final = 600
"""Of one line; more are thinned, evenly on the log axis."""


def curve_figures(files: CurveFiles) -> dict[str, Figure]:
    """Return the page's figures by id, those with nothing to draw left out."""
    figures = {
        "hits": hits_figure(files),
        "misses": misses_figure(files),
        "distance": _reuse_figure(files, "distance (tokens of different blocks)", _distance_tokens),
        "time": _reuse_figure(files, "time until the block is requested again (s)", _time_s),
        "working-set": working_set_figure(files),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def render_curves(files: CurveFiles) -> str:
    return render(
        "curve.html.jinja",
        curve_figures(files),
        tool="report curve",
        title=", ".join(files.labels),
        headlines=headlines(files) or [f"Prefix cache of {', '.join(files.labels)}"],
        defined="docs/curves.md",
        files=files,
        policies=named_policies(files),
        used=[(name, curve, use) for name, curve in _named_curves(files) for use in curve.use],
        at_zero={"distance": at_zero(files, _distance_tokens), "time": at_zero(files, _time_s)},
    )


TELLING_SHARE: Final = 0.9
"""Of the hits of an unlimited cache: the size that the headline names."""


def headlines(files: CurveFiles) -> list[str]:
    """Return a sentence for each curve: the cache that has 90 % of the hits there are."""
    return [_headline(name, curve) for name, curve in _named_curves(files) if curve.sizes and max(curve.hit_tokens) > 0]


def _headline(name: str, curve: OneCurve) -> str:
    most = max(curve.hit_tokens)
    place = next(place for place, hit in enumerate(curve.hit_tokens) if hit >= TELLING_SHARE * most)
    blocks = curve.sizes[place]
    held, unlimited = (wording.share(tokens / curve.input_tokens) for tokens in (curve.hit_tokens[place], most))
    return (
        f"{name}: {TELLING_SHARE:.0%} of max hits at {blocks:,} blocks of {curve.block_size} tokens "
        f"({curve.size_text(blocks * curve.block_size)}). That is {held} of prompt tokens; "
        f"an unlimited cache has {unlimited}."
    )


def _named_curves(files: CurveFiles) -> Iterator[tuple[str, OneCurve]]:
    for label, file in files.curves.items():
        for curve in file.curves:
            yield f"{label}, {curve.block_size}-token blocks" if len(file.curves) > 1 else label, curve


def named_policies(files: CurveFiles) -> list[tuple[str, OneCurve, PolicyHits]]:
    return [(name, curve, policy) for name, curve in _named_curves(files) for policy in curve.policies]


def hits_figure(files: CurveFiles) -> Figure | None:
    """Hit rate by cache size; None without a curve that hits anything."""
    data: list[Trace] = []
    for slot, (name, curve) in enumerate(_named_curves(files)):
        if curve.sizes:
            data += _hits_lines(name, curve, slot)
    for slot, (name, curve, policy) in enumerate(named_policies(files), start=len(data)):
        x = [float(size * curve.block_size) for size in policy.sizes]
        y = [round(hits * curve.block_size / (curve.input_tokens or 1), 6) for hits in policy.hit_blocks]
        data.append(_line(f"{name}: {policy.evict}", x, y, slot, DASHED) | {"line": {"shape": "linear"}})
    return _lines(data, "cache (tokens)", "hit tokens of prompt tokens")


_CAUSE_SLOTS: Final = {"hit": 3, "cold": 1, "evicted": 2, "prompt_logprobs": 5, "last_token": 4, "partial_block": 6}
"""Colours of causes: green for hits, never the ink of text."""
_LONGEST_NAME: Final = 24


def misses_figure(files: CurveFiles) -> Figure | None:
    """Prompt tokens by cause as stacked bars, without causes of no token."""
    bars = [
        (_bar_name(label if share is file.total and len(files.misses) > 1 else share.name), share)
        for label, file in files.misses.items()
        for share in file.shares
    ]
    if not bars:
        return None
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": cause.replace("_", " "),
            "x": [round(share.tokens[cause] / share.input_tokens, 6) for _, share in bars],
            "y": list(range(len(bars))),
            "customdata": [name for name, _ in bars],
            "meta": {"slot": _CAUSE_SLOTS.get(cause, 7), "part": "points"},
            "hovertemplate": "%{customdata}, %{fullData.name}: %{x:.2%}<extra></extra>",
        }
        for cause in bars[0][1].tokens
        if any(share.tokens[cause] for _, share in bars)
    ]
    names = {"tickvals": list(range(len(bars))), "ticktext": [name for name, _ in bars], "autorange": "reversed"}
    x_axis = axis("of prompt tokens", tickformat=".0%", range=[0, 1.001])
    return figure(data, x_axis, names, barmode="stack", bargap=0.3, height=150 + 30 * len(bars))


def _bar_name(name: str) -> str:
    return plain(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")


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
    drawn = [trace for trace in data if trace["x"]]
    return figure(drawn, axis("time (s)"), axis("different tokens touched", rangemode="tozero")) if drawn else None


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
    """The share of repeated accesses that come at x or sooner, from the first x above 0: a log axis has no zero."""
    data: list[Trace] = []
    for slot, (label, file) in enumerate(files.reuses.items()):
        if not file.time_ms.count:  # nothing was used again, so there are no quantiles
            continue
        # Of equal x the last level counts: a line up from 0 would be drawn as a wall.
        known = {x: round(level, 4) for x, level in zip(values(file), file.levels, strict=True) if x > 0.0}
        if known:
            data.append(_line(label, list(known), list(known.values()), slot))
    return _lines(data, x_title, "of repeated accesses")


def at_zero(files: CurveFiles, values: Callable[[ReuseFile], list[float]]) -> str:
    """Return sentences on the repeated accesses at 0, which no log axis shows; empty: there are none."""
    said = []
    for label, file in files.reuses.items():
        if not file.time_ms.count:
            continue
        levels = [level for x, level in zip(values(file), file.levels, strict=True) if x <= 0.0]
        if levels:
            said.append(f" At 0, left of the axis: {wording.share(max(levels))} of {label}.")
    return "".join(said)


def _distance_tokens(file: ReuseFile) -> list[float]:
    return [value * file.block_size for value in file.distance_blocks.quantiles]


def _time_s(file: ReuseFile) -> list[float]:
    return [round(value / 1e3, 6) for value in file.time_ms.quantiles]


def _line(name: str, x: list[float], y: list[float], slot: int, dash: str = "solid") -> Trace:
    hover = "%{fullData.name}: %{y:,} at %{x:,}<extra></extra>"
    return line(x, y, slot, dash=dash, name=name, line={"shape": "hv"}, hovertemplate=hover)


def _lines(data: list[Trace], x_title: str, y_title: str) -> Figure | None:
    y_axis = axis(y_title, tickformat=".0%", rangemode="tozero")
    return figure(data, axis(x_title, type="log"), y_axis) if data else None
