"""The page: self-contained, safe with any label, and drawn by a real browser without asking for anything outside."""

import hashlib
import itertools
import math
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.__main__ import main
from report.compare.comparison import CompareConfig, Compared, compare
from report.compare.panels import comparison_page, gap_figure, survival_figures
from report.output import render_page
from report.pages.figures import log_scale
from tests.report.browser import CHROMIUM, figures_drawn, page_figures

MakeTrace = Callable[..., Path]


def compared(traces: dict[str, Path]) -> Compared:
    return compare(CompareConfig(traces=traces, bootstrap=20))


def rendered(result: Compared) -> str:
    return render_page(comparison_page(result))


class Links(HTMLParser):
    """Every attribute that makes a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.result: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.result += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_figures_are_valid_plotly(make_trace: MakeTrace) -> None:
    result = compared({"captured": make_trace("a"), "predicted": make_trace("b", source="sim", seed=2)})
    figures = [*survival_figures(result).values(), gap_figure(result)]
    for figure in figures:
        assert figure is not None
        assert len(go.Figure(figure).data) == len(figure["data"]) > 0


@pytest.mark.parametrize(
    ("low", "high", "at", "wide", "phone"),
    [
        (0.7, 4.0, [0.5, 1, 2, 5], [], []),
        (30.0, 2_000.0, [20, 50, 100, 200, 500, 1000, 2000], ["20", "50", "100", "200", "500", "1,000", "2,000"], []),
        (
            512.0,
            75e6,
            [500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8],
            ["500", "1k", "2k", "5k", "10k", "20k", "50k", "100k", "200k", "500k", "1M", "2M", "5M", "10M", "20M"],
            ["500", "", "", "", "10k", "", "", "100k", "", "", "1M", "", "", "10M", "", "", "100M"],
        ),
        (7.0, 7.0, None, [], []),
    ],
)
def test_a_log_axis_begins_with_a_label(
    low: float, high: float, at: list[float] | None, wide: list[str], phone: list[str]
) -> None:
    scale = log_scale(low, high)
    ticks = scale["at"]
    assert ticks[0] <= low <= high <= ticks[-1]
    start, end = scale["range"]
    assert start == pytest.approx(math.log10(ticks[0]))
    assert math.log10(ticks[-1]) < end < math.log10(ticks[-1] * 1.1)
    if at is not None:
        assert ticks == at
    for labels in (scale["wide"], scale["narrow"]):
        message = [label for label in labels if label]
        assert labels[0]
        assert len(set(message)) == len(message) >= 1
    assert not wide or scale["wide"][: len(wide)] == wide
    assert not phone or scale["narrow"] == phone


@given(st.floats(1e-6, 1e12), st.floats(1.0, 1e9))
def test_every_log_axis_holds_its_data_between_labelled_ticks(low: float, factor: float) -> None:
    scale = log_scale(low, low * factor)
    ticks = scale["at"]
    assert ticks[0] <= low * (1 + 1e-9)
    assert ticks[-1] >= low * factor * (1 - 1e-9)
    assert all(a < b for a, b in itertools.pairwise(ticks))
    assert len(ticks) <= 64
    decades = [tick for tick in ticks if math.log10(tick) % 1 == 0]
    if factor < 1e6:
        assert all(scale["wide"][ticks.index(tick)] for tick in decades)


def test_page_explains_its_columns(make_trace: MakeTrace) -> None:
    page = rendered(compared({"a": make_trace("a"), "b": make_trace("b", seed=1)}))
    assert set(page_figures(page)) >= {"survival-all", "gaps"}
    assert "<abbr" not in page
    assert "area between the curves, in ms and on ln TTFT" in page


def test_page_has_no_links_and_escapes_labels(make_trace: MakeTrace) -> None:
    page = rendered(compared({"a</script><b>": make_trace("a"), "b": make_trace("b", seed=1)}))
    links = Links()
    links.feed(page)
    assert links.result == []
    assert "a</script><b>" not in page
    assert "default-src 'none'" in page


def test_plotly_bundle_is_the_documented_release() -> None:
    """``npm pack`` in CONTRIBUTING.md renews it; then this digest follows."""
    bundle = (files("report.pages") / "plotly-basic.min.js").read_bytes()
    assert bundle.startswith(b"/**\n* plotly.js (basic - minified) v4.1.1\n")
    assert hashlib.sha256(bundle).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert "</script" not in bundle.decode()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_browser_draws_every_figure_offline(tmp_path: Path, make_trace: MakeTrace) -> None:
    page = tmp_path / "page.html"
    traces = [f"captured={make_trace('a')}", f"predicted={make_trace('b', source='sim', seed=2)}"]
    main(["compare", *traces, "--bootstrap", "20", "--html", str(page)])
    assert figures_drawn(page) >= {"survival-all", "survival-turns2-", "gaps"}
