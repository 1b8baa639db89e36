"""The page of one trace: verdict, cards, figures with captions and numbers, and a sentence where a fact lacks."""

import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from kvtape.pictures import draw
from measure.metrics.trace import measure_run, read_run
from report.__main__ import main
from report.output import render_page
from report.trace.measured import Measured
from report.trace.over_time import MOST_BARS, MOST_ROWS, session_panel
from report.trace.page import trace_page
from report.trace.ttft_survival import wait_panel
from tests.measure.metrics.made import request, run_of
from tests.measure.metrics.test_prefixcache import CAPTURE
from tests.report.browser import CHROMIUM, figures_drawn, page_figures
from tests.report.conftest import MakeTrace
from tracefile.records.schema import Record, SessionId

FIGURES = {"waits", "in-flight", "output-rate", "prompt-rate", "sessions"}


def measured(records: list[Record], **meta: Any) -> Measured:
    run = run_of(records, **meta)
    return Measured(run, measure_run(run))


def rendered(result: Measured) -> str:
    return render_page(trace_page(result))


def page_of(make_trace: MakeTrace, tmp_path: Path, *flags: str) -> str:
    page = tmp_path / "page.html"
    main(["show", str(make_trace("<b>a", sessions=12, turns=3)), "--html", str(page), *flags])
    return page.read_text()


def message_missing(page: str) -> dict[str, str]:
    """Sentences in place of figures, by title."""
    result = re.findall(r'<h3>([^<]+)</h3>\s*<p class="missing">Not drawn: ([^<]+)</p>', page)
    return {title: sentence.replace("&#39;", "'") for title, sentence in result}


def test_the_page_of_a_trace(make_trace: MakeTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(make_trace, tmp_path, "--slo", "ttft.p99<=1ms", "--slo", "success>=90%")
    figures = page_figures(page)
    assert set(figures) == FIGURES
    for drawn in figures.values():
        assert len(go.Figure(drawn).data) == len(drawn["data"]) > 0
        assert all(drawn["layout"][name]["title"]["text"] for name in ("xaxis", "yaxis"))
    assert page.count("<figcaption>") == len(FIGURES)
    assert "<b>a" not in page
    assert "<b>missed</b> ttft.p99&lt;=1ms" in page
    assert "<b>met</b> success&gt;=90%" in page
    terminal = capsys.readouterr().out
    sentence = " ".join(terminal.split("\n\n")[0].splitlines()[1:])
    assert re.fullmatch(
        r"The prefix cache served 9\d\.\d % of \d+k prompt tokens; median TTFT: \d+ ms in turns 2\+, "
        r"\d+ ms in first turns\.",
        sentence,
    )
    assert f"<h1>{sentence}</h1>".replace("turns 2+", "turns\u00a02+").replace(" %", "\u00a0%") in page
    # The same numbers: every cell of the terminal's table of requests stands in the page's.
    row = next(line for line in terminal.splitlines() if line.startswith("TTFT ms  "))
    assert (
        re.findall(r">([^<]+)</td>", page.split('<th scope="row">TTFT ms</th>')[1].split("</tr>")[0]) == row.split()[2:]
    )


def test_single_request_without_optional_fields() -> None:
    page = rendered(measured([request("alone", 5.0)]))
    assert page_figures(page) == {}
    assert "<h1>The trace has no data on the prefix cache.</h1>" in page
    assert message_missing(page) == {
        "Hit rate by cache size": "The trace has no block hashes: record it with tap --tokenizer.",
        "TTFT by turn": "The trace has no time of a first token.",
        "Requests in flight": "The trace has no request with an arrival and an end.",
        "Sessions over time": "The trace has no request with an arrival and an end.",
    }


def test_requests_without_sessions_or_reported_hits() -> None:
    plain = [
        request(f"{n}", 10.0 * n, ttft_ms=5.0, e2e_ms=9.0, prompt_tokens=100 + n, output_tokens=3) for n in range(40)
    ]
    page = rendered(measured(plain))
    figures = page_figures(page)
    assert set(figures) == {"waits", "in-flight", "output-rate", "prompt-rate"}
    assert len(figures["prompt-rate"]["data"]) == 1
    assert message_missing(page)["Sessions over time"] == "The trace names no sessions: each request is alone."


def many(sessions: int, turns: int) -> list[Record]:
    """Sessions of requests one after another, two sessions at a time, then a rest."""
    result = []
    for session in range(sessions):
        for turn in range(turns):
            at_ms = 1000.0 * (session // 2) + 10.0 * turn + session % 2
            known = {"prompt_tokens": 64, "cached_tokens": 48 * (turn > 0), "ttft_ms": 2.0 + turn, "e2e_ms": 9.0}
            name = SessionId(f"s{session}")
            result.append(request(f"{session}-{turn}", at_ms, session_id=name, turn=turn + 1, **known))
    return result


def test_long_trace_is_thinned_evenly() -> None:
    long = measured(many(1_000, 11))
    panel = session_panel(long)
    assert panel.figure is not None
    rows = {row for bar in panel.figure["data"] for row in bar["y"]}
    assert {bar["width"] for bar in panel.figure["data"]} == {0.85}  # else plotly takes the gaps between rows for it
    assert len(rows) == 91 <= MOST_ROWS
    assert sum(len(bar["y"]) for bar in panel.figure["data"]) == 1_001 <= 2 * MOST_BARS
    assert "91 of 1,000 sessions are drawn." in panel.caption
    assert [row[:2] for row in panel.tables[0].rows] == [["no hit", "1,000"], ["50–90 % cached", "10,000"]]
    waits = wait_panel(long)
    assert waits.caption.endswith("Bands: 90% bootstrap of busy periods.")
    # 1,000 sessions of 11 turns wait 2 … 12 ms.
    assert [str(cell) for cell in waits.tables[0].rows[1]] == ["Turn 1", "1,000", *["2.0"] * 4]


def test_the_page_of_a_long_trace_is_small() -> None:
    figures = page_figures(rendered(measured(many(700, 20))))
    assert {"waits", "prompt-rate", "sessions"} <= set(figures)
    parts = [trace["meta"]["part"] for trace in figures["waits"]["data"]]
    assert parts.count("band") == 6


def test_short_sessions_start_at_their_times() -> None:
    short, complete = session_panel(measured(many(200, 2))), session_panel(measured(many(6, 50)))
    assert short.figure is not None
    assert complete.figure is not None
    titles = [figure["layout"]["xaxis"]["title"]["text"] for figure in (short.figure, complete.figure)]
    assert titles == ["time since the session's first arrival (s)", "time since the first arrival (s)"]
    assert {at for bar in short.figure["data"] for at in bar["base"]} == {0.0, 0.01}
    assert {at for bar in complete.figure["data"] for at in bar["base"][:1]} == {0.0, 0.01}


def test_a_notebook_has_the_same_figures() -> None:
    assert set(draw(read_run(CAPTURE))) == FIGURES | {"cache-size"}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found")
def test_browser_draws_every_figure_offline(tmp_path: Path) -> None:
    main(["show", str(CAPTURE), "--html", str(tmp_path / "page.html")])
    assert figures_drawn(tmp_path / "page.html") == FIGURES | {"cache-size"}
