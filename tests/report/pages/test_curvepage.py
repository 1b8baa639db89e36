"""``report curve``: figures that plotly accepts, a page that links to nothing, drawn by a real browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from report.__main__ import main
from report.pages.curvepage import (
    CurveFiles,
    headlines,
    hits_figure,
    misses_figure,
    read_curve_files,
    render_curves,
    working_set_figure,
)
from tests.report.browser import CHROMIUM, figures_drawn, page_figures
from tracefile.records.errors import InputError

TRACE = "/data/monday.jsonl.zst"
CURVE: dict[str, Any] = {"block_size": 16, "lookup_blocks": 9, "input_tokens": 160, "sizes": [1, 2, 3], "use": []}
CURVE |= {"hit_blocks": [1, 2, 5], "hit_tokens": [16, 32, 80]}
SHARE: dict[str, Any] = {
    "name": "all",
    "requests": 2,
    "input_tokens": 160,
    "tokens": {"hit": 80, "cold": 64, "evicted": 16},
}
QUANTILES = {"unit": "ms", "count": 2, "mean": 1.0, "quantiles": [0.0, 16.0]}
WINDOW = {"requests": 1, "accesses": 3, "distinct_blocks": 3, "new_blocks": 3}


def write(folder: Path, name: str, kind: str, **fields: Any) -> str:
    path = folder / name
    path.write_text(json.dumps({"kind": kind, "trace": TRACE, **fields}))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    groups = [{**SHARE, "name": "<b>blue</b>"}, {**SHARE, "name": "red", "input_tokens": 0}]
    return [
        write(tmp_path, "curve.json", "curve", curves=[CURVE, {**CURVE, "block_size": 32}]),
        write(
            tmp_path,
            "misses.json",
            "misses",
            block_size=16,
            usable_blocks=None,
            rejected=0,
            total=SHARE,
            cohorts=[{**SHARE, "name": "turn 1"}],
            by="tenant",
            groups=groups,
            evictions=[[1, 20_000], [0, 3]],
        ),
        write(
            tmp_path,
            "reuse.json",
            "reuse",
            block_size=16,
            levels=[0.5, 1.0],
            time_ms=QUANTILES,
            distance_requests=QUANTILES,
            distance_blocks=QUANTILES,
            window_ms=60_000.0,
            windows=[{"start_ms": 60_000.0 * at, "seen_blocks": at + 3, **WINDOW} for at in range(3)],
        ),
    ]


class Links(HTMLParser):
    """Every attribute that makes a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_figures_hold_what_the_files_say(files: list[str]) -> None:
    found = read_curve_files(files)
    hits, misses, working_set = hits_figure(found), misses_figure(found), working_set_figure(found)
    assert hits is not None
    assert misses is not None
    assert working_set is not None
    for figure in (hits, misses, working_set):
        assert len(go.Figure(figure).data) == len(figure["data"])
    assert [line["name"] for line in hits["data"]] == [f"monday.jsonl.zst, {size}-token blocks" for size in (16, 32)]
    assert (hits["data"][0]["x"], hits["data"][0]["y"]) == ([16, 32, 48], [0.1, 0.2, 0.5])
    # A group without tokens has no shares; one cohort alone is the whole again; no bar repeats the file's name.
    assert misses["layout"]["yaxis"]["ticktext"] == ["all", "‹b›blue‹/b›"]
    assert [(bar["name"], bar["x"][0]) for bar in misses["data"]] == [("hit", 0.5), ("cold", 0.4), ("evicted", 0.1)]
    assert working_set["data"][1]["y"] == [48, 64, 80]


def test_causes_of_no_token_are_not_in_the_legend_and_hits_are_not_black(tmp_path: Path) -> None:
    total = {**SHARE, "tokens": {"hit": 80, "cold": 80, "evicted": 0, "behind_miss": 0}}
    whole: dict[str, Any] = {"block_size": 16, "usable_blocks": None, "by": None, "groups": [], "evictions": []}
    alone = [{**total, "name": "turn unknown"}]
    file = write(tmp_path, "misses.json", "misses", total=total, cohorts=alone, **whole)
    found = read_curve_files([file])
    figure = misses_figure(found)
    assert figure is not None
    assert [bar["name"] for bar in figure["data"]] == ["hit", "cold"]
    assert 0 not in [bar["meta"]["slot"] for bar in figure["data"]]
    assert "turn unknown" not in render_curves(found)


def test_the_headline_names_the_cache_with_90_percent_of_the_hits(tmp_path: Path, files: list[str]) -> None:
    curve = {**CURVE, "sizes": [10, 20, 3_000, 4_000], "hit_tokens": [16, 32, 72, 80], "hit_blocks": [1, 2, 4, 5]}
    found = read_curve_files([write(tmp_path, "one.json", "curve", curves=[curve])])
    assert headlines(found) == [
        "monday.jsonl.zst: 90% of max hits at 3,000 blocks of 16 tokens (48,000 tokens). That is 45.0 % of prompt "
        "tokens; an unlimited cache has 50.0 %."
    ]
    assert "90% of max hits at 3,000 blocks" in render_curves(found)
    nothing = {**CURVE, "sizes": [], "hit_tokens": [], "hit_blocks": []}
    none = read_curve_files([write(tmp_path, "none.json", "curve", curves=[nothing])])
    assert headlines(none) == headlines(read_curve_files(files[1:])) == []


def test_groups_are_shown_by_tokens_saved_and_sizes_in_memory(tmp_path: Path) -> None:
    group = {
        "name": "<b>blue</b>",
        "requests": 3,
        "sessions": 2,
        "shared_tokens": 32,
        "example": "r7",
        "hit_tokens": 80,
        "hit_blocks": 5,
        "inserted_blocks": 3,
        "input_tokens": 160,
    }
    group |= {"hit_rate": 0.5, "hit_share": 1.0, "inserted_share": 0.25, "held_share": 0.125, "lookup_blocks": 9}
    rest = {**group, "name": "4 others", "sessions": None, "shared_tokens": None, "example": None}
    use = {"blocks": 3, "tokens": 48, "groups": [group, rest], "others": 4, "largest_other": 16}
    curve = {**CURVE, "use": [use], "kv_bytes_per_token": 2**20}
    found = read_curve_files([write(tmp_path, "one.json", "curve", curves=[curve])])
    assert "at 3 blocks of 16 tokens (48 tokens, 48.0 MiB)" in headlines(found)[0]
    page = render_curves(found)
    assert "a cache of 3 usable blocks (48 tokens, 48.0 MiB), by group" in page
    row = page.split("&lt;b&gt;blue&lt;/b&gt;</th>")[1].split("</tr>")[0]
    assert re.findall(r">([^<>\n]+)</td>", row) == [
        *("80", "100 %", "50.0 %", "3", "2", "32", "25.0 %", "12.5 %", "r7"),
    ]
    assert "4 others" in page


def test_reuse_at_zero_is_told_and_not_drawn_as_a_wall(tmp_path: Path) -> None:
    times = {**QUANTILES, "quantiles": [0.0, 0.0, 2_000.0, 2_000.0, 5_000.0]}
    fields = {"block_size": 16, "levels": [0.0, 0.25, 0.5, 0.75, 1.0], "window_ms": 1.0, "windows": []}
    reuse = write(tmp_path, "reuse.json", "reuse", time_ms=times, distance_blocks=times, **fields)
    page = render_curves(read_curve_files([reuse]))
    drawn = page_figures(page)["time"]["data"][0]
    assert (drawn["x"], drawn["y"]) == ([2.0, 5.0], [0.75, 1.0])
    assert "At 0, left of the axis: 25.0 % of monday.jsonl.zst." in page


def test_a_trace_that_uses_nothing_again_has_no_reuse_figure(tmp_path: Path) -> None:
    """``sim reuse`` has levels then, and no quantiles."""
    times = {**QUANTILES, "count": 0, "mean": None, "quantiles": []}
    fields = {"block_size": 16, "levels": [0.0, 0.5, 1.0], "window_ms": 1.0, "windows": []}
    reuse = write(tmp_path, "reuse.json", "reuse", time_ms=times, distance_blocks=times, **fields)
    assert "At 0, left" not in render_curves(read_curve_files([reuse]))


def test_a_sampled_curve_has_its_band(tmp_path: Path) -> None:
    sampled = {**CURVE, "hit_tokens_low": [16, 16, 64], "hit_tokens_high": [16, 48, 96]}
    hits = hits_figure(read_curve_files([write(tmp_path, "sampled.json", "curve", curves=[sampled])]))
    assert hits is not None
    assert [line["y"] for line in hits["data"]] == [[0.1, 0.1, 0.4], [0.1, 0.3, 0.6], [0.1, 0.2, 0.5]]
    assert len(go.Figure(hits).data) == 3


def test_what_is_not_given_is_not_drawn(files: list[str]) -> None:
    assert 'id="hits"' not in render_curves(read_curve_files(files[1:]))
    assert hits_figure(CurveFiles()) is misses_figure(CurveFiles()) is working_set_figure(CurveFiles()) is None


def test_the_page_links_to_nothing_and_escapes_names(files: list[str]) -> None:
    page = render_curves(read_curve_files([f"a<i>={files[1]}"]))
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "<b>blue</b>" not in page
    assert "a<i>" not in page
    assert "20,000" in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "kind"), ('{"kind":"pool"}', "pool"), ("[", "expected what sim curve"), (None, "expected a file")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=told) as error:
        main(["curve", str(path), "--html", str(tmp_path / "page.html")])
    assert "other.json" in str(error.value)


def test_a_label_stands_for_one_file_of_a_kind(files: list[str]) -> None:
    assert read_curve_files([f"a={files[0]}", f"b={files[0]}", f"a={files[2]}"]).labels == ["a", "b"]
    with pytest.raises(InputError, match="'a' is given twice"):
        read_curve_files([f"a={files[0]}", f"a={files[0]}"])


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_a_browser_draws_every_figure_and_asks_for_nothing(tmp_path: Path, files: list[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["curve", *files, "--html", str(page)]) == 0
    assert figures_drawn(page) == {"hits", "misses", "distance", "time", "working-set"}
