"""Pages of ``sim curve``: figures that plotly accepts."""

import numpy as np
import plotly.graph_objects as go

from measure.cache.hitcurve import HitCurve
from report.pages.panels import Page
from sim.cache.curve import curve_page

TRACE = "/data/monday.jsonl.zst"


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
        complete_chains=2,
    )


def page_of(result: HitCurve, *, kv_bytes: int | None = None) -> Page:
    return curve_page(TRACE, result, kv_bytes)


def test_figures_have_the_numbers() -> None:
    page = page_of(curve(1, 2, 5))
    assert set(page.figures) == {"hits"}
    for figure in page.figures.values():
        assert len(go.Figure(figure).data) == len(figure["data"])
    (hits,) = page.figures["hits"]["data"]
    assert (hits["x"], hits["y"]) == ([16, 32, 48], [0.1, 0.2, 0.5])


def test_headline_has_the_cache_of_90_percent_hits() -> None:
    assert page_of(curve(*([1] * 2_999), 4, 5, 5)).headlines == [
        "90% of max hits at 3,001 blocks (48,016 tokens) of 16 tokens. That is 50.0 % of prompt tokens; an unlimited "
        "cache hits 50.0 %."
    ]
    page = page_of(curve())
    assert (page.headlines, page.figures) == ([f"Prefix cache of {TRACE}"], {})


def test_sizes_in_memory() -> None:
    assert "at 3 blocks (48 tokens, 48.0 MiB)" in page_of(curve(1, 2, 5), kv_bytes=2**20).headlines[0]
