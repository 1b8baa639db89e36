"""Page of ``sim curve``: hits by size."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from measure import wording
from report.pages.figures import axis, figure, line
from report.pages.panels import Figure, Page, Panel

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


def _steps(x: list[int], y: list[float]) -> Figure:
    hover = "%{y:,} at %{x:,}<extra></extra>"
    drawn = line(x, y, 0, showlegend=False, line={"shape": "hv"}, hovertemplate=hover)
    y_axis = axis("hit tokens of prompt tokens", tickformat=".0%", rangemode="tozero")
    return figure([drawn], axis("cache (tokens)", type="log"), y_axis)
