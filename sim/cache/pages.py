"""A cache's numbers as pages: hits by size, misses by cause."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from measure import wording
from report.pages.figures import Trace, axis, figure, line, plain
from report.pages.panels import Figure, Page, Panel, Table
from sim.cache.results import Attribution, CauseShare

if TYPE_CHECKING:
    from measure.cache.hitcurve import HitCurve

MOST_POINTS: Final = 600
"""Of one line; more are thinned, evenly on the log axis."""
TELLING_SHARE: Final = 0.9
"""Of the hits of an unlimited cache: the size that the headline names."""


def curve_page(trace: str, curve: "HitCurve", kv_bytes: int | None) -> Page:
    """Return the page of ``sim curve``; ``kv_bytes``: of a token's KV, if sizes are shown in memory."""
    return Page(
        tool="sim curve",
        title=trace,
        defined="docs/curves.md",
        headlines=[_sentence(curve, kv_bytes) if curve.max_hit_blocks else f"Prefix cache of {trace}"],
        panels=list(_hit_panels(curve)),
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
            figure=_steps(x, y),
            caption="Prompt tokens that an LRU of full blocks serves, of all prompt tokens. Blocks that outputs filled "
            "count where they are known.",
        )


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


def _steps(x: list[int], y: list[float]) -> Figure:
    hover = "%{y:,} at %{x:,}<extra></extra>"
    drawn = line(x, y, 0, showlegend=False, line={"shape": "hv"}, hovertemplate=hover)
    y_axis = axis("hit tokens of prompt tokens", tickformat=".0%", rangemode="tozero")
    return figure([drawn], axis("cache (tokens)", type="log"), y_axis)
