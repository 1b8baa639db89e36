"""Pages of ``sim curve`` and ``sim misses``: figures that plotly accepts, tables, names that stay text."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from measure.cache.hitcurve import HitCurve
from report.output import render_page
from sim.cache.pages import curve_page, misses_page
from sim.cache.results import Attribution, CauseShare, Distribution, Reuse, Window

TRACE = "/data/monday.jsonl.zst"
QUANTILES = Distribution(unit="ms", count=2, mean=1.0, quantiles=[0.0, 16.0])
REUSE = Reuse(
    block_size=16,
    requests=3,
    accesses=9,
    first_accesses=3,
    levels=(0.5, 1.0),
    time_ms=QUANTILES,
    distance_blocks=QUANTILES,
    window_ms=60_000.0,
    windows=[
        Window(start_ms=60_000.0 * at, requests=1, accesses=3, distinct_blocks=3, new_blocks=3, seen_blocks=at + 3)
        for at in range(3)
    ],
)


def curve(*hit_blocks: int) -> HitCurve:
    hits = np.array(hit_blocks, np.int64)
    return HitCurve(
        sizes=np.arange(1, len(hits) + 1),
        hit_blocks=hits,
        bound_blocks=hits,
        block_size=16,
        lookup_blocks=9,
        input_tokens=160,
        fine_block_size=16,
        requests=2,
        whole_chains=2,
    )


def test_figures_hold_the_numbers() -> None:
    page = curve_page(TRACE, curve(1, 2, 5), None, REUSE)
    assert set(page.figures) == {"hits", "distance", "time", "working-set"}
    for figure in page.figures.values():
        assert len(go.Figure(figure).data) == len(figure["data"])
    (hits,) = page.figures["hits"]["data"]
    assert (hits["x"], hits["y"]) == ([16, 32, 48], [0.1, 0.2, 0.5])
    assert page.figures["working-set"]["data"][1]["y"] == [48, 64, 80]


def test_misses_by_cause() -> None:
    tokens = {"hit": 80, "cold": 64, "evicted": 16, "last_token": 0}
    total = CauseShare(name="all", requests=2, input_tokens=160, tokens=tokens)
    found = Attribution(
        block_size=16,
        usable_blocks=None,
        rejected=0,
        total=total,
        cohorts=[replace(total, name="<b>turn 1</b>"), replace(total, name="turns 2+", input_tokens=0)],
    )
    page = misses_page(TRACE, found)
    figure = page.figures["misses"]
    # A cohort without tokens has no shares, a cause without tokens no bar.
    assert figure["layout"]["yaxis"]["ticktext"] == ["all", "‹b›turn 1‹/b›"]
    assert [(bar["name"], bar["x"][0]) for bar in figure["data"]] == [("hit", 0.5), ("cold", 0.4), ("evicted", 0.1)]
    assert 0 not in [bar["meta"]["slot"] for bar in figure["data"]]
    html = render_page(page)
    assert "<b>turn 1</b>" not in html
    assert page.headlines == ["50.0 % of prompt tokens hit in an unlimited pool"]
