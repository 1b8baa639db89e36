"""A what-if as one page: what each load asks of the engine, survival curves with bands, every effect."""

from typing import Final

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from report.pages.figures import Figure, Trace
from report.pages.page import asset, script_json, template
from report.pages.whatif import (
    LEVELS,
    Curve,
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
