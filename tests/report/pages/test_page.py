"""The page: self-contained, safe with any label, and drawn by a real browser without asking for anything outside."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest

from report.__main__ import main
from report.compare.comparison import CompareConfig, Compared, compare
from report.pages.figures import arrival_figure, cached_figure, error_figure, gap_figure, survival_figures
from report.pages.page import render_page
from tests.report.browser import CHROMIUM, figures_drawn

MakeTrace = Callable[..., Path]


def compared(traces: dict[str, Path]) -> Compared:
    return compare(CompareConfig(traces=traces, truths={}, yardstick=None, seed=0, bootstrap=20))


class Links(HTMLParser):
    """Every attribute that makes a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_figures_are_valid_plotly(make_trace: MakeTrace) -> None:
    found = compared({"captured": make_trace("a"), "predicted": make_trace("b", source="sim", seed=2)})
    figures = [*survival_figures(found).values(), gap_figure(found), cached_figure(found), arrival_figure(found)]
    for figure in [*figures, error_figure(found, "turns2+")]:
        assert figure is not None
        assert len(go.Figure(figure).data) == len(figure["data"]) > 0


def test_the_page_links_to_nothing_and_escapes_labels(make_trace: MakeTrace) -> None:
    page = render_page(compared({"a</script><b>": make_trace("a"), "b": make_trace("b", seed=1)}))
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "a</script><b>" not in page
    assert "default-src 'none'" in page


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_every_figure_and_asks_for_nothing(tmp_path: Path, make_trace: MakeTrace) -> None:
    page = tmp_path / "page.html"
    traces = [f"captured={make_trace('a')}", f"predicted={make_trace('b', source='sim', seed=2)}"]
    main(["compare", *traces, "--bootstrap", "20", "--html", str(page)])
    assert figures_drawn(page) >= {"survival-all", "survival-turns2-", "cached", "errors", "gaps", "arrivals"}
