"""Forecasts as one page each: a what-if's survival curves and effects, and a search's percentile by value."""

from typing import Final

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from measure.cohorts import cohort_title
from report.pages.figures import Figure, Trace
from report.pages.page import asset, script_json, template
from report.pages.search import Evaluated, Search, answer_sentence, answer_warnings, cells, headings
from report.pages.whatif import (
    LEVELS,
    Curve,
    Span,
    WhatIf,
    cohort_titles,
    effect_text,
    load_sentence,
    telling_cohort,
    ttft,
    value_text,
)

MOST_DRAWN: Final = 8
"""Curves in one figure, the palette's colours; of a longer sweep these are spread evenly, both ends among them."""
ENGINE: Final = {
    "itl.p50": "ITL p50, ms",
    "itl.p99": "ITL p99, ms",
    "e2e.p50": "end to end p50, ms",
    "queue.p90": "queue p90, ms",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "hit_rate": "hit rate",
    "preemptions": "preemptions",
    "unserved": "never served",
}


def render_what_if(result: WhatIf) -> str:
    """Return the page as text; it fetches nothing."""
    titles = cohort_titles(result)
    drawn = drawn_rows(len(result.rows))
    figures = {f"survival-{number}": survival_figure(result, name, drawn) for number, name in enumerate(titles)}
    return template("whatif.html.jinja").render(
        result=result,
        titles=titles,
        telling=telling_cohort(result),
        engine=ENGINE,
        level_names=list(LEVELS),
        ttft=ttft,
        value=value_text,
        effect=effect_text,
        load=load_sentence,
        left_out=len(result.rows) - len(drawn),
        figures=figures,
        figures_json=script_json(figures),
        plotly=Markup(get_plotlyjs()),
        style=Markup(asset("page.css")),
        script=Markup(asset("page.js")),
    )


def drawn_rows(count: int) -> list[int]:
    """Return the rows to draw of ``count``, the first and the last always."""
    if count <= MOST_DRAWN:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_DRAWN - 1)) for place in range(MOST_DRAWN)})


def survival_figure(result: WhatIf, cohort: str, drawn: list[int]) -> Figure:
    """Draw each row's curve with the band of its members; a mark where a curve stops at the horizon."""
    data: list[Trace] = []
    for slot, number in enumerate(drawn):
        row = result.rows[number]
        if cohort in row.curves:
            data += _curve_traces(row.name, row.curves[cohort], slot)
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": "TTFT (ms)"}, "type": "log"},
            "yaxis": {"title": {"text": "still without a first token"}, "tickformat": ".0%", "rangemode": "tozero"},
        },
    }


def _curve_traces(name: str, curve: Curve, slot: int) -> list[Trace]:
    edges: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": curve.time_ms,
            "y": edge,
            "line": {"shape": "hv"},
            "fill": fill,
            "hoverinfo": "skip",
            "showlegend": False,
            "meta": {"slot": slot, "part": "band"},
        }
        for edge, fill in ((curve.low, "none"), (curve.high, "tonexty"))
    ]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": curve.time_ms,
        "y": curve.middle,
        "line": {"shape": "hv"},
        "meta": {"slot": slot, "part": "line", "width": 2.4 if slot == 0 else 2.0, "dash": "6px,3px"},
        "hovertemplate": "%{fullData.name}: %{y:.1%} after %{x:,.0f} ms<extra></extra>",
    }
    if not curve.stops:
        return [*edges, line]
    stop: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": curve.time_ms[-1:],
        "y": curve.middle[-1:],
        "showlegend": False,
        "meta": {"slot": slot, "part": "points", "size": 11, "symbol": "x"},
        "hovertemplate": "the capture's end: %{y:.1%} would wait longer<extra></extra>",
    }
    return [*edges, line, stop]


_NAMES: Final = {"num-gpu-blocks": "KV blocks", "rate": "rate, as a multiple of the capture's"}


def render_search(found: Search) -> str:
    """Return the page as text; it fetches nothing."""
    figures = {"curve": curve_figure(found)}
    return template("search.html.jinja").render(
        found=found,
        answer=answer_sentence(found),
        warnings=answer_warnings(found),
        headings=headings(found),
        rows=[cells(found, one) for one in found.evaluated],
        figures=figures,
        figures_json=script_json(figures),
        plotly=Markup(get_plotlyjs()),
        style=Markup(asset("page.css")),
        script=Markup(asset("page.js")),
    )


def curve_figure(found: Search) -> Figure:
    """Draw the percentile over the searched quantity, without values whose median member has no value."""
    shown = [one for one in found.evaluated if one.ttft.middle is not None]
    x = [one.value for one in shown]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": edge,
            "fill": fill,
            "hoverinfo": "skip",
            "showlegend": False,
            "meta": {"slot": 0, "part": "band"},
        }
        for edge, fill in (([one.ttft.low for one in shown], "none"), ([_top(one.ttft) for one in shown], "tonexty"))
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"TTFT p{found.percentile * 100:g}, {cohort_title(found.cohort).lower()}",
            "x": x,
            "y": [one.ttft.middle for one in shown],
            "meta": {"slot": 0, "part": "line", "width": 2.2, "dash": "6px,3px"},
            "hovertemplate": "%{y:,.0f} ms at %{x:,}<extra></extra>",
        }
    )
    data += [_points(shown, 0, holds=True), _points(shown, 1, holds=False)]
    ends = [found.low, found.high]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{found.limit_ms:,g} ms",
            "x": ends,
            "y": [found.limit_ms] * 2,
            "meta": {"slot": -1, "part": "line", "width": 1.4, "dash": "solid"},
        }
    )
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": _NAMES[found.quantity]}, "type": "log"},
            "yaxis": {"title": {"text": "TTFT (ms)"}, "type": "log"},
        },
    }


def _points(shown: list[Evaluated], slot: int, *, holds: bool) -> Trace:
    own = [one for one in shown if one.holds is holds]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "holds" if holds else "fails",
        "x": [one.value for one in own],
        "y": [one.ttft.middle for one in own],
        "customdata": [one.share for one in own],
        "meta": {"slot": slot, "part": "points", "size": 9, "symbol": "circle" if holds else "x"},
        "hovertemplate": "%{customdata:.0%} of the members at %{x:,}<extra></extra>",
    }


def _top(span: Span) -> float | None:
    """The upper end, the middle where that is open."""
    return span.middle if span.high is None else span.high
