"""One trace, one set of numbers: ``report show``, its page and its tables.

The ends of loadgen and replay
print the same object: tests/loadgen/test_loadgen.py and tests/replay/test_replay.py hold them to ``report show``.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from measure.metrics.results import STATISTICS
from measure.metrics.statistics import statistics_of
from measure.number_format import duration_ms
from report.__main__ import main
from tests.jsonoutput import json_of
from tests.measure.metrics.made import request
from tests.report.browser import page_figures
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Meta

SESSIONS = {"s0": 3, "s1": 2, "s2": 4, "s3": 1, "s4": 2}
"""Requests by session: each is done before the next of its session, and each ends well."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The JSON of ``report show``, and the folder of its files with its page in it."""
    folder = tmp_path_factory.mktemp("shown")
    trace, out, page = folder / "trace.jsonl", folder / "files", folder / "page.html"
    drawn = np.random.default_rng(7)
    with TraceWriter(trace, Meta(source="client", block_size=16)) as writer:
        for position, (session, turns) in enumerate(SESSIONS.items()):
            at_ms, prompt, output = 150.0 * position, int(drawn.integers(100, 200)), 0
            for turn in range(1, turns + 1):
                cached = prompt if turn > 1 else 0
                prompt += output + int(drawn.integers(10, 50))
                output = int(drawn.integers(2, 9))
                gaps = [float(f"{gap:.3f}") for gap in drawn.gamma(9.0, 2.0, output - 1)]
                ttft_ms = float(f"{drawn.gamma(4.0, 20.0):.3f}")
                e2e_ms = ttft_ms + sum(gaps)
                writer.write(
                    request(
                        f"{session}-{turn}", at_ms, session_id=session, turn=turn, ttft_ms=ttft_ms, itl_ms=gaps,
                        e2e_ms=e2e_ms, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output,
                        max_tokens=output,
                    )
                )  # fmt: skip
                at_ms += e2e_ms + 30.0
    flags = ["--files", str(out), "--html", str(page), "--slo", "ttft.p99<=1s", "--slo", "e2e.p50<=10s"]
    result = json_of(main, ["show", str(trace), *flags])
    page.rename(out / "page.html")
    return result, out


def summary(values: list[float]) -> dict[str, float]:
    result = statistics_of(np.array(values))
    assert result is not None
    return {name: getattr(result, name) for name in STATISTICS}


def test_tables_equal_the_json(shown: tuple[dict[str, Any], Path]) -> None:
    result, out = shown
    for table, key in (("requests", "per_request"), ("sessions", "per_session")):
        rows = pq.read_table(out / f"{table}.parquet").to_pylist()
        for name, expected in result[key].items():
            if expected is None or name == "itl_ms":  # lists of a request
                continue
            values = [row[name] for row in rows if row[name] is not None]
            assert summary(values) == pytest.approx({item: expected[item] for item in STATISTICS}), name


def test_page_equals_the_json(shown: tuple[dict[str, Any], Path]) -> None:
    result, out = shown
    page = (out / "page.html").read_text()
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', page, re.DOTALL))
    for name, key, metric in (
        ("E2E ms", "per_request", "e2e_ms"),
        ("ITL ms", "per_request", "itl_ms"),
        ("TTFAT ms", "per_session", "ttfat_ms"),
    ):
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", rows[name])
        assert cells[:7] == [duration_ms(result[key][metric][item]) for item in STATISTICS], name
    curve = next(
        trace for trace in page_figures(page)["waits"]["data"] if trace.get("name", "").startswith("All requests")
    )
    reached = [x for x, y in zip(curve["x"], curve["y"], strict=True) if 1.0 - y >= 0.5 - 1e-9]
    assert reached[0] == pytest.approx(result["per_request"]["ttft_ms"]["p50"], rel=1e-4)
