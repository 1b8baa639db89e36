"""Figures as SVG and PNG: every trace drawn, every title said, the same bytes every time, no other file lost."""

import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import kvtape
from measure.metrics.trace import measure_run, read_run
from report.__main__ import main
from report.compare.comparison import CompareConfig, compare
from report.files.measured import Measured
from report.images import folder
from report.images.palette import palette, slot_colour
from report.pages.figures import DASHED, axis, band, figure, line, points
from report.pages.page import comparison_figures
from report.trace.page import draw_chapters, trace_figures
from tests.report.conftest import MakeTrace
from tracefile.records.errors import InputError

SVG = "{http://www.w3.org/2000/svg}"


def drawn(one: Mapping[str, Any]) -> ElementTree.Element:
    """The figure as parsed SVG."""
    return ElementTree.fromstring(svg_of(one))


def svg_of(one: Mapping[str, Any]) -> bytes:
    pytest.importorskip("matplotlib")
    from report.images.drawing import draw_images

    return draw_images(one, ("svg",))["svg"]


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def traces(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    marked = [group for group in root.iter() if group.get("id", "").startswith("trace-")]
    return {group.get("id", ""): group for group in marked}


def check(one: Mapping[str, Any]) -> None:
    """Checks that each trace is there and each axis has its title."""
    root = drawn(one)
    found = traces(root)
    assert list(found) == [f"trace-{number}" for number in range(len(one["data"]))]
    assert all(any(True for _ in group.iter(f"{SVG}path")) for group in found.values())
    for name in ("xaxis", "yaxis"):
        title = one["layout"].get(name, {}).get("title", {}).get("text")
        assert title is None or title in texts(root)


def test_every_figure_of_a_comparison_is_drawn(
    make_trace: MakeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    paths = {
        "captured": make_trace("a", sessions=12),
        "predicted $a_1$": make_trace("b", sessions=12, source="sim", seed=2),
        "_cold": make_trace("c", sessions=12, cold=True),
    }
    found = compare(CompareConfig(traces=paths, truths={}, repeats=(), seed=0, bootstrap=20))
    for one in comparison_figures(found).values():
        check(one)
    written: dict[Path, set[str]] = {}
    monkeypatch.setattr("kvtape.pictures.write_folder", lambda folder, figures: written.update({folder: set(figures)}))
    kvtape.write_images(found, tmp_path / "images")
    assert written == {tmp_path / "images": set(comparison_figures(found))}
    said = texts(drawn(comparison_figures(found)["survival-all"]))
    assert {"predicted $a_1$", "_cold", "100%"} <= set(said)  # no formula, no name left out


def test_every_figure_of_a_traces_page_is_drawn(make_trace: MakeTrace) -> None:
    pytest.importorskip("matplotlib")
    path = make_trace("a", sessions=4)
    run = read_run(path)
    figures = trace_figures(draw_chapters(Measured(path, run, measure_run(run), ())))
    assert {"in-flight", "sessions", "shape-turns", "waits"} <= set(figures)
    for one in figures.values():
        check(one)


def style_of(group: ElementTree.Element) -> str:
    return " ".join(element.get("style", "") for element in group.iter())


def test_colours_dashes_steps_and_ticks_are_the_pages() -> None:
    data = [
        *band([1, 10, 100], [0.8, 0.4, 0.0], [1.0, 0.6, 0.2], 1, line={"shape": "hv"}),
        line([1, 10, 100], [1.0, 0.5, 0.1], 1, dash=DASHED, name="b<br>c", line={"shape": "hv"}),
        points([2, None], [0.5, 0.2], 2, {"size": 9}, name="<b>points</b>"),
    ]
    root = drawn(figure(data, axis("ms", type="log"), axis("share", tickformat=".3~%", range=[0, 1])))
    assert {"1", "10", "100", "0%", "20%", "100%", "ms", "share", "points"} <= set(texts(root))
    filled, dashed, marks = (style_of(traces(root)[f"trace-{number}"]) for number in (1, 2, 3))
    assert f"fill: {palette()['c1']}; fill-opacity: 0.17" in filled
    assert f"stroke-dasharray: 4.32,2.16; stroke-dashoffset: 0; stroke: {slot_colour(9)}" in dashed  # 6 and 3 pixels
    assert slot_colour(2) in marks
    step = next(traces(root)["trace-2"].iter(f"{SVG}path")).get("d", "")
    assert step.count("L") == 4  # across, then down, twice


def test_error_bars_reach_their_ends() -> None:
    reach = {"type": "data", "symmetric": False, "array": [2.0], "arrayminus": [1.0]}
    data = [points([3.0], [5.0], 1, {"size": 9}, error_x=reach, error_y=reach)]
    root = drawn(figure(data, axis("a", range=[0, 10]), axis("b", range=[0, 10])))
    bars = [path for path in root.iter(f"{SVG}path") if f"stroke: {slot_colour(1)}" in path.get("style", "")]
    ends = [places_in(path) for path in bars if len(places_in(path)) == 2]
    frame = places_in(next(next(one for one in root.iter() if one.get("id") == "patch_2").iter(f"{SVG}path")))
    for at in (0, 1):
        whole = max(place[at] for place in frame) - min(place[at] for place in frame)
        longest = max(abs(first[at] - last[at]) for first, last in ends)
        assert longest / whole == pytest.approx(0.3, abs=0.001)  # from 2 to 5, and from 4 to 7, of 10


def places_in(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]


def ends_of(root: ElementTree.Element, trace: int) -> list[float]:
    """The x coordinates of a trace's path."""
    return [x for x, _ in places_in(next(traces(root)[f"trace-{trace}"].iter(f"{SVG}path")))]


def test_bars_stand_beside_or_on_one_another() -> None:
    def bar(x: list[Any], y: list[Any], slot: int, **more: Any) -> dict[str, Any]:
        return {"type": "bar", "x": x, "y": y, "name": f"bar {slot}", "meta": {"slot": slot, "part": "points"}, **more}

    def places(**layout: Any) -> list[str]:
        data = [bar(["p", "q"], [1, 2], 0), bar(["p", "q"], [3, 4], 1)]
        root = drawn(figure(data, {"type": "category"}, axis("n"), **layout))
        assert {"p", "q", "bar 0", "bar 1"} <= set(texts(root))
        return [next(group.iter(f"{SVG}path")).get("d", "").split()[1] for group in traces(root).values()]

    alone = bar([4, 5], [1, 2], 0)
    with_line = drawn(figure([alone, line([4, 4], [0, 2], 1)], axis("x"), axis("n")))
    (left, _, right), middle = ends_of(with_line, 0)[:3], ends_of(with_line, 1)[0]
    assert (left + right) / 2 == pytest.approx(middle, abs=0.01)  # a line is no bar beside the others
    beside, stacked = places(), places(barmode="stack")
    assert beside[0] != beside[1]
    assert stacked[0] == stacked[1]
    flat = bar([0.5, 0.25], [0, 1], 3, orientation="h", base=[0.0, 0.5])
    names = {"tickvals": [0, 1], "ticktext": ["all", "turn 1"], "autorange": "reversed"}
    check(figure([flat], axis("of tokens", tickformat=".0%", range=[0, 1]), names, barmode="stack", height=200))


def test_texts_stand_in_the_bars_that_have_room() -> None:
    bars = {"type": "bar", "x": [5.0, 9.9], "width": [9.0, 0.1], "y": [3, 3], "base": [1, 1], "name": "prefix"}
    told = {"text": ["5k tokens<br>× 9 requests", "no room"], "meta": {"slot": 1, "part": "points"}}
    root = drawn(figure([bars | told], axis("a"), axis("b", autorange="reversed"), barmode="overlay"))
    assert {"5k tokens", "× 9 requests"} <= set(texts(root))
    assert "no room" not in texts(root)


def test_a_trace_of_another_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="pie: no type of trace"):
        svg_of({"data": [{"type": "pie", "x": [1], "y": [1]}], "layout": {}})


@pytest.mark.parametrize(
    ("d3", "value", "text"),
    [
        (".0%", 0.25, "25%"),
        (".3~%", 0.025, "2.5%"),
        ("+.0%", 0.1, "+10%"),
        ("+.1%", -0.025, "−2.5%"),
        (",d", 12_000.0, "12,000"),
        ("", 0.5, "0.5"),
        (",.1f", 1_234.56, "1,234.6"),
    ],
)
def test_number_formats(d3: str, value: float, text: str) -> None:
    pytest.importorskip("matplotlib")
    from report.images.drawing import number_format

    assert number_format(d3)(value) == text


CURVE = '{"kind": "curve", "trace": "a.jsonl", "curves": [{"block_size": 16, "input_tokens": 160, "sizes": [1, 9], "hit_tokens": [16, 80]}]}'  # noqa: E501


def test_a_command_writes_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "curve.json").write_text(CURVE)
    command = ["curve", str(tmp_path / "curve.json"), "--images", str(tmp_path / "images")]
    assert main(command) == 0
    svg, png = (tmp_path / "images" / f"hits.{suffix}" for suffix in ("svg", "png"))
    assert sorted(path.name for path in svg.parent.iterdir()) == ["hits.png", "hits.svg"]
    assert struct.unpack(">II", png.read_bytes()[16:24]) == (1600, 840)
    assert capsys.readouterr().err == f"images: {svg.parent}: 1 figure as SVG and PNG\n"
    before = svg.read_bytes(), png.read_bytes()
    assert main(command) == 0
    assert (svg.read_bytes(), png.read_bytes()) == before
    png.write_text("my thesis")
    with pytest.raises(InputError, match=r"hits\.png: already there, and not a PNG image"):
        main(command)


def test_bad_folders_and_a_missing_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "curve.json"
    trace.write_text(CURVE)

    def said(images: Path) -> str:
        with pytest.raises(InputError) as caught:
            main(["curve", str(trace), "--images", str(images)])
        return str(caught.value)

    have: Callable[[], bool] = lambda: True  # noqa: E731
    monkeypatch.setattr(folder, "can_draw", have)
    assert said(trace) == f"--images {trace}: is a file; expected a folder"
    assert said(tmp_path / "a" / "b").endswith("its folder is not there; expected one to write in")
    monkeypatch.setattr(folder, "can_draw", lambda: False)
    assert (
        said(tmp_path / "images") == f"--images {tmp_path / 'images'}: needs matplotlib: pip install 'kvtape[images]'"
    )
    with pytest.raises(InputError, match="nothing to write; expected --html PAGE, --images DIR or both"):
        main(["curve", str(trace)])
