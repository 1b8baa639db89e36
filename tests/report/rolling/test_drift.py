"""``report drift``: windows of rolling fits, their changes, and a page that a real browser draws."""

import json
import re
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest

from measure.fitindex import Estimate, FittedWindow, WindowErrors, read_windows, write_windows
from report.__main__ import main
from report.rolling.drift import make_page
from report.rolling.page import drift_figures, render_drift
from tests.report.browser import page_figures
from tracefile.records.errors import InputError

NOON_S = 1_763_812_800


def estimate(value: float, state: str = "identified") -> Estimate:
    return Estimate(value=value, low=0.97 * value, high=1.03 * value, unit="ms/step", state=state)  # type: ignore[arg-type]


def window(number: int, factor: float) -> FittedWindow:
    """An hour of an engine so many times as slow, whose cost per output is borrowed."""
    wobble = 1.0 + 0.004 * (-1) ** number
    return FittedWindow(
        window=f"2025-11-22T{12 + number}:00:00Z",
        begin_s=NOON_S + 3600.0 * number,
        length_s=3600.0,
        status="fitted",
        reason=None,
        traces=["captured"],
        requests=900,
        digest=str(number),
        model=f"model-{number}.json",
        lender="cal.json",
        pace=estimate(factor * wobble),
        parameters={"t0_ms": estimate(10.0 * factor * wobble), "per_decode_ms": estimate(factor, "borrowed")},
        errors={"before": WindowErrors(p50=0.0, p90=None, median_abs=0.04)},
    )


def day(*factors: float) -> list[FittedWindow]:
    skipped = FittedWindow(
        window="2025-11-22T22:00:00Z",
        begin_s=NOON_S + 36_000.0,
        length_s=3600.0,
        status="skipped",
        reason="only 3 requests have a TTFT",
        traces=["captured"],
        requests=3,
        digest="s",
    )
    return [*(window(number, factor) for number, factor in enumerate(factors)), skipped]


UPGRADED = day(1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3)


def test_an_upgrade_is_named_with_its_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_windows(tmp_path, UPGRADED)
    assert main(["drift", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert [(one["number"], one["window"], one["ratio"]) for one in found["changes"]] == [
        ("pace", "2025-11-22T16:00:00Z", 1.3),
        ("t0_ms", "2025-11-22T16:00:00Z", 1.3),
    ]
    assert found["headline"] == [
        "Changed from 2025-11-22T16:00:00Z on: steps took × 1.300 (95 % interval 1.272 to 1.329) and t0_ms × 1.300 "
        "(95 % interval 1.272 to 1.329); the model of the window before missed TTFT by 4% at the median, in the middle "
        "window by 4%.",
        "1 of 9 windows were skipped.",
    ]
    assert re.search(r"2025-11-22T16:00:00Z \* +900 +1.305 \(1.266 … 1.344\)", told.err)
    assert "only 3 requests have a TTFT" in told.err
    assert [
        FittedWindow(**one | {k: getattr(w, k) for k in ("pace", "parameters", "errors")})
        for one, w in zip(found["windows"], UPGRADED, strict=True)
    ] == UPGRADED


def test_a_borrowed_cost_changes_with_the_pace_alone(tmp_path: Path) -> None:
    assert {one.number for one in make_page(UPGRADED).changes} == {"pace", "t0_ms"}
    assert make_page(day(*[1.0] * 8)).headline[0] == "No change beyond the intervals and the usual drift in 8 windows."


def test_figures_are_plotlys_and_mark_the_change() -> None:
    figures = drift_figures(make_page(UPGRADED))
    assert list(figures) == ["pace", "errors", "t0-ms", "per-decode-ms"]
    for figure in figures.values():
        go.Figure(msgspec.json.decode(msgspec.json.encode(figure)))
    marks = [trace for trace in figures["pace"]["data"] if trace.get("hoverinfo") == "name"]
    assert [(mark["x"], mark["name"]) for mark in marks] == [([4.0, 4.0], "× 1.300 (1.272 to 1.329)")]
    states = {trace.get("name"): trace["meta"].get("symbol") for trace in figures["per-decode-ms"]["data"]}
    assert states["borrowed"] == "circle-open"
    assert figures["pace"]["layout"]["xaxis"]["ticktext"][:2] == ["12:00", "14:00"]
    page_figures(render_drift(make_page(UPGRADED)))


def test_an_index_is_read_as_it_was_written_and_bad_ones_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no windows.jsonl is there; expected the folder of sim fit --window"):
        main(["drift", str(tmp_path)])
    write_windows(tmp_path, UPGRADED)
    assert read_windows(tmp_path) == UPGRADED
    write_windows(tmp_path, [UPGRADED[0], UPGRADED[0]])
    with pytest.raises(InputError, match=r"windows.jsonl:2: window: '2025-11-22T12:00:00Z' is on line 1 too"):
        read_windows(tmp_path)
    write_windows(tmp_path, UPGRADED[-1:])
    with pytest.raises(InputError, match=r"no window is fitted \(the first: only 3 requests have a TTFT\)"):
        main(["drift", str(tmp_path)])
    write_windows(tmp_path, UPGRADED)
    with pytest.raises(InputError, match=r"--html .*: an input of this command"):
        main(["drift", str(tmp_path), "--html", str(tmp_path / "windows.jsonl")])
