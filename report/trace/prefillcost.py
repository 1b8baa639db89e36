"""TTFT against uncached tokens, with the line through it: the price of a token that the cache did not serve."""

from typing import Final

import numpy as np

from measure.cohorts import own_traits
from measure.metrics.prefillfit import saved_prefill_ms, told_prefills
from measure.metrics.results import PrefillFit
from measure.metrics.tables import prefill_sentences
from measure.runs import Run
from measure.table import TextTable
from measure.wording import count, duration, sentence
from report.files.measured import Measured
from report.pages.figures import Figure, Trace, axis, figure, five_digits, line, points, thinned
from report.trace.panels import Panel
from tracefile.records.arrays import BoolArray, IntArray

LOG_FROM: Final = 20.0
"""Spread of the tokens (largest over smallest) from which on both axes are logarithmic."""
LINE_POINTS: Final = 80
MOST_POINTS: Final = 1_000
"""Of a class of requests: four of them and a dozen other figures stay under 1.5 MB."""
_TITLE: Final = "TTFT by uncached tokens"


def prefill_panels(measured: Measured) -> list[Panel]:
    """Return TTFT by uncached tokens with its line."""
    run, fit, place = measured.run, measured.metrics.prefill.fit, "prefill-cost"
    told = told_prefills(run)
    if not told.any():
        why = "No request has both a time of its first token and reported cached tokens."
        return [Panel(place, _TITLE, missing=why, half=True)]
    return [
        Panel(place, _TITLE, prefill_figure(run, told, fit), _caption(measured), _numbers(fit), toggles="xy", half=True)
    ]


def prefill_figure(run: Run, told: BoolArray, fit: PrefillFit | None) -> Figure:
    """Draw requests by hit and turn, and the line over the range of their tokens."""
    tokens = own_traits(run).uncached_tokens
    low, high = int(max(tokens[told].min(), 1)), int(tokens[told].max())
    kind = {"type": "log"} if high > LOG_FROM * low else {}
    data = [_points(run, name, slot, symbol, rows) for name, slot, symbol, rows in _classes(run, told) if len(rows)]
    if fit is not None:
        x = np.unique(np.round(np.geomspace(low, max(high, low + 1), LINE_POINTS)))
        y = fit.intercept_ms + fit.ms_per_1000_tokens * x / 1000.0
        above = y > 0
        xs, ys = ([*map(five_digits, one[above])] for one in (x, y))
        data.append(line(xs, ys, 0, name="line through them", hoverinfo="skip"))
    return figure(data, axis("prompt tokens not cached", **kind), axis("TTFT (ms)", **kind))


def _classes(run: Run, told: BoolArray) -> list[tuple[str, int, str, IntArray]]:
    """Return name, colour, symbol and rows of each class of requests."""
    hit, later = run.cached_tokens > 0, run.turn >= 2
    return [
        (f"{word}, {turns}", slot, symbol, np.flatnonzero(told & (hit == has_hit) & (later == is_later)))
        for word, has_hit, slot in (("hit", True, 1), ("no hit", False, 2))
        for turns, is_later, symbol in (("turns 2+", True, "circle"), ("turn 1", False, "diamond-open"))
    ]


def _points(run: Run, name: str, slot: int, symbol: str, rows: IntArray) -> Trace:
    kept = rows[thinned(len(rows), MOST_POINTS)]
    tokens = own_traits(run).uncached_tokens[kept]
    hover = "%{fullData.name}: %{y:,} ms for %{x:,} tokens<extra></extra>"
    look = {"size": 6, "symbol": symbol, "opacity": 0.6}
    return points(tokens.tolist(), [*map(five_digits, run.ttft_ms[kept])], slot, look, name=name, hovertemplate=hover)


def _caption(measured: Measured) -> str:
    fit, reported = measured.metrics.prefill.fit, measured.metrics.hits.reported.get("all")
    if fit is None:
        return "All requests have equally many uncached tokens, so no line tells the price of one."
    if fit.tokens_per_s is None:
        return "The waits do not grow with uncached tokens: something else than prefill decides them."
    said = sentence(next(prefill_sentences(fit)).removeprefix("prefill: "))
    if not fit.idle:
        return (
            f"{said} Too few requests ({fit.idle_requests:,}) were sent to an idle engine: the line holds waits in the "
            "queue, so it is no price of prefill."
        )
    saved_ms, saved = saved_prefill_ms(fit, reported), ""
    if saved_ms is not None and reported is not None:
        saved = f" At this price the {count(reported.tokens)} tokens from the cache saved {duration(saved_ms)}."
    return f"{said} Line: {fit.n:,} requests sent to an idle engine.{saved}"


def _numbers(fit: PrefillFit | None) -> TextTable | None:
    lines = [[one] for one in prefill_sentences(fit)]
    return TextTable(["line through TTFT by uncached tokens"], lines) if lines else None
