"""A search as one HTML page: the percentile by value with its band and the target, and every value that was tried."""

from typing import Final

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from measure.cohorts import cohort_title
from report.pages.figures import Figure, Trace
from report.pages.page import asset, script_json, template
from report.pages.search import Evaluated, Search, answer_sentence, answer_warnings, cells, headings
from report.pages.whatif import Span

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
