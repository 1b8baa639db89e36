"""Pages of ``sim curve`` and ``sim misses``: figures that plotly accepts, tables, names that stay text."""

from typing import Any

import plotly.graph_objects as go

from report.output import render_page
from report.pages.curves import curve_page, misses_page
from report.pages.panels import Page

TRACE = "/data/monday.jsonl.zst"
CURVE: dict[str, Any] = {"block_size": 16, "lookup_blocks": 9, "input_tokens": 160, "sizes": [1, 2, 3]}
CURVE |= {"hit_blocks": [1, 2, 5], "hit_tokens": [16, 32, 80]}
SHARE: dict[str, Any] = {
    "name": "all",
    "requests": 2,
    "input_tokens": 160,
    "tokens": {"hit": 80, "cold": 64, "evicted": 16},
}
QUANTILES = {"unit": "ms", "count": 2, "mean": 1.0, "quantiles": [0.0, 16.0]}
WINDOW = {"requests": 1, "accesses": 3, "distinct_blocks": 3, "new_blocks": 3}
REUSE: dict[str, Any] = {
    "block_size": 16,
    "levels": [0.5, 1.0],
    "time_ms": QUANTILES,
    "distance_blocks": QUANTILES,
    "window_ms": 60_000.0,
    "windows": [{"start_ms": 60_000.0 * at, "seen_blocks": at + 3, **WINDOW} for at in range(3)],
}


def curves(*found: dict[str, Any], **more: Any) -> Page:
    return curve_page({"kind": "curve", "trace": TRACE, "curves": list(found), **more})


def test_figures_hold_the_numbers() -> None:
    page = curves(CURVE, {**CURVE, "block_size": 32}, reuse=REUSE)
    assert set(page.figures) == {"hits", "distance", "time", "working-set"}
    for figure in page.figures.values():
        assert len(go.Figure(figure).data) == len(figure["data"])
    hits = page.figures["hits"]["data"]
    assert [line["name"] for line in hits] == ["16-token blocks", "32-token blocks"]
    assert (hits[0]["x"], hits[0]["y"]) == ([16, 32, 48], [0.1, 0.2, 0.5])
    assert page.figures["working-set"]["data"][1]["y"] == [48, 64, 80]


def test_the_headline_names_the_cache_with_90_percent_of_the_hits() -> None:
    curve = {**CURVE, "sizes": [10, 20, 3_000, 4_000], "hit_tokens": [16, 32, 72, 80], "hit_blocks": [1, 2, 4, 5]}
    assert curves(curve).headlines == [
        "90% of max hits at 3,000 blocks (48,000 tokens) of 16 tokens. That is 45.0 % of prompt tokens; an unlimited "
        "cache has 50.0 %."
    ]
    page = curves({**CURVE, "sizes": [], "hit_tokens": [], "hit_blocks": []})
    assert (page.headlines, page.figures) == ([f"Prefix cache of {TRACE}"], {})


def test_reuse_at_zero_is_in_words_and_not_drawn_as_a_wall() -> None:
    times = {**QUANTILES, "quantiles": [0.0, 0.0, 2_000.0, 2_000.0, 5_000.0]}
    found = {**REUSE, "levels": [0.0, 0.25, 0.5, 0.75, 1.0], "time_ms": times, "distance_blocks": times}
    page = curves(CURVE, reuse=found)
    drawn = page.figures["time"]["data"][0]
    assert (drawn["x"], drawn["y"]) == ([2.0, 5.0], [0.75, 1.0])
    assert "At 0, left of the axis: 25.0 %." in render_page(page)
    nothing = {**QUANTILES, "count": 0, "mean": None, "quantiles": []}
    assert "time" not in curves(CURVE, reuse={**found, "time_ms": nothing, "distance_blocks": nothing}).figures


def test_misses_by_cause() -> None:
    total = {**SHARE, "tokens": {**SHARE["tokens"], "behind_miss": 0}}
    cohorts = [{**total, "name": "<b>turn 1</b>"}, {**total, "name": "turns 2+", "input_tokens": 0}]
    found = {
        "block_size": 16,
        "usable_blocks": None,
        "cohorts": cohorts,
    }
    page = misses_page({"trace": TRACE, "total": total, **found})
    figure = page.figures["misses"]
    # A cohort without tokens has no shares, a cause without tokens no bar.
    assert figure["layout"]["yaxis"]["ticktext"] == ["all", "‹b›turn 1‹/b›"]
    assert [(bar["name"], bar["x"][0]) for bar in figure["data"]] == [("hit", 0.5), ("cold", 0.4), ("evicted", 0.1)]
    assert 0 not in [bar["meta"]["slot"] for bar in figure["data"]]
    html = render_page(page)
    assert "<b>turn 1</b>" not in html
    assert page.headlines == ["50.0 % of prompt tokens hit in an unlimited pool"]
