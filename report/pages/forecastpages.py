"""Forecasts as one page each: a what-if's survival curves and effects, and a search's percentile by value."""

from typing import Final

from measure import wording
from measure.cohorts import cohort_title
from report.pages.figures import DASHED, Figure, Trace, axis, band, figure, line, points
from report.pages.page import cohort_id, render
from report.pages.search import Evaluated, Search, answer_sentence, answer_warnings, cells, headings, percentile_name
from report.pages.whatif import (
    LEVELS,
    MEASURED,
    Curve,
    Row,
    Span,
    WhatIf,
    cohort_titles,
    effect_text,
    error_text,
    headline,
    load_sentence,
    settings_sentence,
    shown_rows,
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


def what_if_figures(result: WhatIf) -> dict[str, Figure]:
    """Return the page's figures by id: TTFT survival of each cohort."""
    drawn = drawn_rows(len(shown_rows(result)))
    return {f"survival-{cohort_id(name)}": survival_figure(result, name, drawn) for name in cohort_titles(result)}


def render_what_if(result: WhatIf) -> str:
    titles = cohort_titles(result)
    rows = shown_rows(result)
    drawn = drawn_rows(len(rows))
    return render(
        "whatif.html.jinja",
        what_if_figures(result),
        result=result,
        rows=rows,
        base=settings_sentence(result),
        titles=titles,
        telling=telling_cohort(result),
        engine=ENGINE,
        tool="sim what-if",
        title=result.trace,
        headlines=[headline(result)],
        defined="docs/what-if.md",
        level_names=list(LEVELS),
        ttft=ttft,
        value=value_text,
        effect=effect_text,
        error=error_text,
        load=load_sentence,
        left_out=len(rows) - len(drawn),
    )


def drawn_rows(count: int) -> list[int]:
    """Return the rows to draw of ``count``, the first and the last always."""
    if count <= MOST_DRAWN:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_DRAWN - 1)) for place in range(MOST_DRAWN)})


SCENARIO_DASHES: Final = ("2px,3px", "10px,3px", "10px,3px,2px,3px")
"""Scenarios in turn, each unlike the base's: equal curves both show."""


def survival_figure(result: WhatIf, cohort: str, drawn: list[int]) -> Figure:
    """Draw the rows' curves: the measured and the base's wide and below, so that none hides an equal curve.

    Scenarios of one curve are one line with all their names.
    """
    data: list[Trace] = []
    rows, scenarios = shown_rows(result), list[tuple[Curve, Trace]]()
    for slot, number in enumerate(drawn):
        row, curve = rows[number], rows[number].curves.get(cohort)
        if curve is None:
            continue
        if row.kind == "scenario" and (equal := next((line for other, line in scenarios if other == curve), None)):
            equal["name"] += f" = {row.name}"
            continue
        traces = _curve_traces(row, curve, slot)
        data += traces
        if row.kind == "scenario":
            scenarios.append((curve, next(trace for trace in traces if trace["meta"]["part"] == "line")))
    y_axis = axis("still without a first token", tickformat=".3~%", range=[0, 1.02])
    return figure(data, axis("TTFT (ms)", type="log"), y_axis)


def _curve_traces(row: Row, curve: Curve, slot: int) -> list[Trace]:
    measured, scenario = row.kind == MEASURED, row.kind == "scenario"
    traces = [] if measured else band(curve.time_ms, curve.low, curve.high, slot, line={"shape": "hv"})
    traces.append(
        line(
            curve.time_ms,
            curve.middle,
            slot,
            width=2.0 if scenario else 3.0 if measured else 4.5,
            dash="solid" if measured else SCENARIO_DASHES[slot % 3] if scenario else DASHED,
            name=row.name,
            line={"shape": "hv"},
            hovertemplate="%{fullData.name}: %{y:.1%} after %{x:,.0f} ms<extra></extra>",
        )
    )
    if curve.stops:
        said = "the capture's end: %{y:.1%} would wait longer<extra></extra>"
        look = {"size": 11, "symbol": "x"}
        traces.append(points(curve.time_ms[-1:], curve.middle[-1:], slot, look, showlegend=False, hovertemplate=said))
    return traces


_NAMES: Final = {
    "num-gpu-blocks": "KV blocks",
    "replicas": "replicas",
    "host-blocks": "KV blocks on the host",
    "prefill-workers": "prefill workers",
    "decode-workers": "decode workers",
    "rate": "rate, as a multiple of the capture's",
}


def search_figures(found: Search) -> dict[str, Figure]:
    """Return the page's figure by id: the percentile by value."""
    return {"curve": curve_figure(found)}


def render_search(found: Search) -> str:
    return render(
        "search.html.jinja",
        search_figures(found),
        tool="sim search",
        title=found.trace,
        headlines=[wording.capitalized(answer_sentence(found))],
        defined="docs/what-if.md",
        found=found,
        warnings=answer_warnings(found),
        headings=headings(found),
        rows=[cells(found, one) for one in found.evaluated],
    )


def curve_figure(found: Search) -> Figure:
    """Draw the percentile over the searched quantity, without values whose median member has no value."""
    shown = [one for one in found.evaluated if one.latency.middle is not None]
    x = [one.value for one in shown]
    data = band(x, [one.latency.low for one in shown], [_top(one.latency) for one in shown], 0)
    data += [
        line(
            x,
            [one.latency.middle for one in shown],
            0,
            dash=DASHED,
            name=f"{percentile_name(found)}, {cohort_title(found.cohort).lower()}",
            hovertemplate="%{y:,.0f} ms at %{x:,}<extra></extra>",
        ),
        _tried(shown, 0, holds=True),
        _tried(shown, 1, holds=False),
        line([found.low, found.high], [found.limit_ms] * 2, -1, width=1.4, name=f"{found.limit_ms:,g} ms"),
    ]
    return figure(data, axis(_NAMES[found.quantity], type="log"), axis(f"{found.metric.upper()} (ms)", type="log"))


def _tried(shown: list[Evaluated], slot: int, *, holds: bool) -> Trace:
    own = [one for one in shown if one.holds is holds]
    return points(
        [one.value for one in own],
        [one.latency.middle for one in own],
        slot,
        {"size": 9, "symbol": "circle" if holds else "x"},
        name="holds" if holds else "fails",
        customdata=[one.share for one in own],
        hovertemplate="%{customdata:.0%} of the members at %{x:,}<extra></extra>",
    )


def _top(span: Span) -> float | None:
    """The upper end, the middle where that is open."""
    return span.middle if span.high is None else span.high
