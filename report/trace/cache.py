"""Hit rate by KV cache size: LRU curve of the trace's blocks, sufficient size, and the engine's size."""

from typing import Final

import numpy as np

from measure.cache.hitcurve import HitCurve
from measure.metrics.results import CacheSize, HitCount
from measure.metrics.tables import cache_sentences
from measure.number_format import cache_size, count, factor, share
from report.pages.figures import DASHED, Trace, axis, figure, five_digits, line, points
from report.pages.panels import Figure, Panel, Table
from report.trace.measured import Measured

MOST_POINTS: Final = 400
FIRST_SHARE: Final = 0.01
"""Share of the max hits that the smallest size drawn has."""
_BEYOND: Final = 1.6
"""Room to the right of the last size that matters."""
_TITLE: Final = "Hit rate by cache size"
_NO_HASHES = "The trace has no block hashes: record it with tap --tokenizer."
SHARES: Final = (0.50, 0.80, 0.90, 0.95, 0.99, 1.00)


def size_panel(measured: Measured) -> Panel:
    """Return the hit rate by KV cache size, with engine size and reported rate if known."""
    analysis = measured.analysis
    if analysis is None:
        return Panel(title=_TITLE, missing=_NO_HASHES)
    if not analysis.curve.max_hit_blocks:
        return Panel(title=_TITLE, missing="No prompt block repeats: a cache of any size has no hit.")
    return Panel(
        title=_TITLE,
        id="cache-size",
        figure=size_figure(analysis.curve, analysis.size, measured.metrics.hits.reported.get("all")),
        caption=_caption(analysis.size),
        tables=[_numbers(analysis.curve, analysis.size)],
    )


def _caption(size: CacheSize) -> str:
    knee = cache_size(size.knee_tokens or 0, size.kv_bytes_per_token)
    enough = f"{size.knee_share * 100:g} % of what an unlimited cache serves needs {knee}"
    if size.engine_tokens and size.knee_tokens:
        ratio = size.knee_tokens / size.engine_tokens
        enough += f", {share(ratio)} of the engine's size" if ratio < 1 else f", {factor(ratio)} × the engine's size"
    return (
        f"{enough}: the knee. The line is an LRU of the trace's blocks, one request at a time. An engine with large "
        "batches needs more, as running requests hold their blocks."
    )


def size_figure(curve: HitCurve, size: CacheSize, reported: HitCount | None) -> Figure:
    """Draw the hit rate curve beyond the largest relevant KV cache size."""
    block, most = curve.block_size, len(curve.sizes)
    last = int(max(most, size.engine_blocks or 0) * _BEYOND)
    first = max(curve.size_for_share(FIRST_SHARE), 1)
    positions = np.unique(np.geomspace(first, most, MOST_POINTS).astype(int))
    sizes = [*positions.tolist(), last]
    rates = [five_digits(curve.rate_at(blocks)) for blocks in sizes]
    top = max(rates[-1], (reported.rate or 0.0) if reported is not None else 0.0) * 1.08
    hover = "%{x:,} tokens: %{y:.1%}<extra></extra>"
    data: list[Trace] = [
        line([blocks * block for blocks in sizes], rates, 1, name="LRU", line={"shape": "hv"}, hovertemplate=hover)
    ]
    if size.knee_tokens is not None and size.knee_blocks is not None:
        knee = curve.rate_at(size.knee_blocks)
        name = f"knee: {cache_size(size.knee_tokens, size.kv_bytes_per_token)}"
        style = {"size": 11, "symbol": "diamond"}
        data.append(points([size.knee_tokens], [five_digits(knee)], 2, style, name=name, hovertemplate=hover))
    if size.engine_tokens is not None:
        name = f"engine: {cache_size(size.engine_tokens, size.kv_bytes_per_token)}"
        data.append(line([size.engine_tokens] * 2, [0.0, top], 0, width=1.6, dash=DASHED, name=name, hoverinfo="name"))
    if reported is not None and reported.rate is not None:
        data.append(_reported(reported.rate, size.engine_tokens, sizes[0] * block, last * block))
    y_axis = axis("hit rate (hit / prompt tokens)", tickformat=".0%", range=[0.0, top])
    return figure(data, axis("KV cache size (tokens)", type="log"), y_axis)


def _reported(rate: float, engine_tokens: int | None, first: int, last: int) -> Trace:
    """Draw the engine's reported prefix hit rate: a point at its size, a line if the size is unknown."""
    name, style = f"reported: {share(rate)}", {"size": 10, "symbol": "star"}
    if engine_tokens is None:
        return line([first, last], [five_digits(rate)] * 2, 3, width=1.6, dash="2px,3px", name=name, hoverinfo="name")
    hover = "reported: %{y:.1%}<extra></extra>"
    return points([engine_tokens], [five_digits(rate)], 3, style, name=name, hovertemplate=hover)


def _numbers(curve: HitCurve, size: CacheSize) -> Table:
    sizes = {f"{ratio:.0%} of max hits": curve.size_for_share(ratio) for ratio in SHARES}
    if size.engine_blocks is not None:
        sizes["the engine's size"] = size.engine_blocks
    rows = [
        [name, f"{blocks:,}", count(blocks * curve.block_size), share(curve.rate_at(blocks))]
        for name, blocks in sizes.items()
    ]
    rows += [[sentence] for sentence in cache_sentences(size)]
    rows = [row + [""] * (4 - len(row)) for row in rows]
    return Table(["size", "usable blocks", "tokens", "of prompt tokens"], rows, folded=True)
