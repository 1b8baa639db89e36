"""A cache's numbers as pages: hits by size and by group, misses by cause, reuse, working set."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from measure import wording
from report.pages.figures import DASHED, Trace, axis, figure, line, plain
from report.pages.panels import Figure, Page, Panel, Table
from sim.cache.results import Attribution, CauseShare, Reuse

if TYPE_CHECKING:
    from measure.cache.hitcurve import HitCurve

MOST_POINTS: Final = 600
"""Of one line; more are thinned, evenly on the log axis."""
TELLING_SHARE: Final = 0.9
"""Of the hits of an unlimited cache: the size that the headline names."""


def curve_page(trace: str, curve: "HitCurve", kv_bytes: int | None, reuse: Reuse | None) -> Page:
    """Return the page of ``sim curve``; ``kv_bytes``: of a token's KV, if sizes are shown in memory."""
    panels = [*_hit_panels(curve), *([] if reuse is None else _reuse_panels(reuse))]
    return Page(
        tool="sim curve",
        title=trace,
        defined="docs/curves.md",
        headlines=[_sentence(curve, kv_bytes) if curve.max_hit_blocks else f"Prefix cache of {trace}"],
        panels=panels,
    )


def _sentence(curve: "HitCurve", kv_bytes: int | None) -> str:
    """Return the cache that has 90 % of the hits there are."""
    blocks = curve.size_for_share(TELLING_SHARE)
    size = f"{blocks:,} blocks ({wording.cache_size(blocks * curve.block_size, kv_bytes)})"
    held, unlimited = (wording.share(curve.rate_at(size)) for size in (blocks, len(curve.sizes)))
    return (
        f"{TELLING_SHARE:.0%} of max hits at {size} of {curve.block_size} tokens. "
        f"That is {held} of prompt tokens; an unlimited cache has {unlimited}."
    )


def _hit_panels(curve: "HitCurve") -> Iterator[Panel]:
    title = "Hits by cache size"
    if len(curve.sizes):
        sizes = np.unique(np.geomspace(1, len(curve.sizes), MOST_POINTS).astype(int)).tolist()
        x, y = [size * curve.block_size for size in sizes], [round(curve.rate_at(size), 6) for size in sizes]
        yield Panel(
            chapter=title,
            title=title,
            id="hits",
            figure=_shares([_line("", x, y, 0)], "cache (tokens)", "hit tokens of prompt tokens"),
            caption="Prompt tokens that an LRU of full blocks serves, of all prompt tokens. Blocks that outputs filled "
            "count where they are known.",
        )


def _reuse_panels(found: Reuse) -> Iterator[Panel]:
    by_depth = [value * found.block_size for value in found.distance_blocks.quantiles]
    by_time = [round(value / 1e3, 6) for value in found.time_ms.quantiles]
    for place, title, x_title, values in (
        ("distance", "Reuse by depth", "distance (tokens of different blocks)", by_depth),
        ("time", "Reuse by time", "time until the block is requested again (s)", by_time),
    ):
        known = {x: round(level, 4) for x, level in zip(values, found.levels, strict=False) if x > 0.0}
        zero = max((level for x, level in zip(values, found.levels, strict=False) if x <= 0.0), default=0.0)
        at_zero = f" At 0, left of the axis: {wording.share(zero)}." if zero else ""
        if known:
            drawn = _shares([_line("", list(known), list(known.values()), 0)], x_title, "of repeated accesses")
            caption = f"Share of repeated accesses of a block that come at most so far after the last one.{at_zero}"
            yield Panel(
                chapter="Reuse" if place == "distance" else "",
                title=title,
                id=place,
                figure=drawn,
                caption=caption,
                half=True,
            )
    if found.windows:
        yield Panel(
            title="Working set",
            id="working-set",
            figure=_working_set(found),
            caption="Different tokens touched in each window; dashed: since the beginning, the content of an unlimited "
            "cache.",
        )


def _working_set(found: Reuse) -> Figure:
    indexes = np.unique(np.linspace(0, len(found.windows) - 1, MOST_POINTS).astype(int))
    windows = [found.windows[index] for index in indexes]
    x = [round(window.start_ms / 1e3, 3) for window in windows]
    touched = [float(window.distinct_blocks * found.block_size) for window in windows]
    seen = [float(window.seen_blocks * found.block_size) for window in windows]
    data = [_line(f"in {found.window_ms / 1e3:g} s", x, touched, 0), _line("since the beginning", x, seen, 1, DASHED)]
    return figure(data, axis("time (s)"), axis("different tokens touched", rangemode="tozero"))


_CAUSE_SLOTS: Final = {"hit": 3, "cold": 1, "evicted": 2, "prompt_logprobs": 5, "last_token": 4, "partial_block": 6}
"""Colours of causes: green for hits, never the ink of text."""
_LONGEST_NAME: Final = 24


def misses_page(trace: str, found: Attribution) -> Page:
    """Return the page of ``sim misses``."""
    rows = [found.total, *(found.cohorts if len(found.cohorts) > 1 else [])]
    shares = [share for share in rows if share.input_tokens]
    cells = [
        [
            share.name,
            f"{share.requests:,}",
            f"{share.input_tokens:,}",
            *(wording.share(tokens / share.input_tokens) for tokens in share.tokens.values()),
        ]
        for share in shares
    ]
    causes = [cause.replace("_", " ") for cause in found.total.tokens]
    pool = "an unlimited pool" if found.usable_blocks is None else f"{found.usable_blocks:,} usable blocks"
    caption = f"{pool} of {found.block_size} tokens; shares of each row's prompt tokens"
    tables = [Table(["requests", "n", "prompt tokens", *causes], cells, caption)]
    panel = Panel(
        title="Misses by cause",
        id="misses",
        figure=_bars(shares) if shares else None,
        caption="Every prompt token has exactly one cause. More memory can bring what is evicted, and no more.",
        tables=tables,
    )
    hit = wording.share_of(found.total.tokens["hit"], found.total.input_tokens)
    headline = f"{hit} of prompt tokens hit in {pool}"
    return Page(tool="sim misses", title=trace, defined="docs/curves.md", headlines=[headline], panels=[panel])


def _bars(shares: list[CauseShare]) -> Figure:
    """Draw prompt tokens by cause as stacked bars, without causes of no token."""
    names = [
        plain(one.name if len(one.name) <= _LONGEST_NAME else f"{one.name[: _LONGEST_NAME - 1]}…") for one in shares
    ]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": cause.replace("_", " "),
            "x": [round(share.tokens[cause] / share.input_tokens, 6) for share in shares],
            "y": list(range(len(shares))),
            "customdata": names,
            "meta": {"slot": _CAUSE_SLOTS.get(cause, 7), "part": "points"},
            "hovertemplate": "%{customdata}, %{fullData.name}: %{x:.2%}<extra></extra>",
        }
        for cause in shares[0].tokens
        if any(share.tokens[cause] for share in shares)
    ]
    rows = {"tickvals": list(range(len(shares))), "ticktext": names, "autorange": "reversed"}
    x_axis = axis("of prompt tokens", tickformat=".0%", range=[0, 1.001])
    return figure(data, x_axis, rows, barmode="stack", bargap=0.3, height=150 + 30 * len(shares))


def _line(name: str, x: list[float], y: list[float], slot: int, dash: str = "solid") -> Trace:
    hover = "%{fullData.name}: %{y:,} at %{x:,}<extra></extra>"
    shown = {"name": name} if name else {"showlegend": False}
    return line(x, y, slot, dash=dash, line={"shape": "hv"}, hovertemplate=hover, **shown)


def _shares(data: list[Trace], x_title: str, y_title: str) -> Figure:
    return figure(data, axis(x_title, type="log"), axis(y_title, tickformat=".0%", rangemode="tozero"))
