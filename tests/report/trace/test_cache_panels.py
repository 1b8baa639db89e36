"""The figure of hits by cache size: the curve's marks, points and the line."""

from typing import Any

import pytest

from measure.metrics.trace import analyse_chains, measure_run
from report.trace.cache import size_panel
from report.trace.measured import Measured
from tests.measure.metrics.made import request, run_of
from tests.measure.metrics.test_prefixcache import asked
from tracefile.records.schema import Engine, Record


def measured(records: list[Record], **meta: Any) -> Measured:
    run = run_of(records, **meta)
    analysis = analyse_chains(run)
    return Measured(run, measure_run(run, analysis=analysis), analysis)


def test_curve_has_knee_engine_size_and_reported_rate() -> None:
    records = [
        asked(name, at_ms, blocks, name[0], cached_tokens=cached)
        for name, at_ms, blocks, cached in (("a1", 0.0, [1, 2], 0), ("b1", 10.0, [3], 0), ("a2", 20.0, [1, 2], 16))
    ]
    result = measured(records, block_size=16, engine=Engine(num_gpu_blocks=3))
    panel = size_panel(result)
    assert panel.figure is not None
    curve, knee, engine, reported = panel.figure["data"]
    # 83 prompt tokens: a block hits from two blocks of cache on, both from three on.
    assert list(zip(curve["x"], curve["y"], strict=True)) == [(32, 0.19277), (48, 0.38554), (64, 0.38554)]
    assert (knee["name"], knee["x"], knee["y"]) == ("knee: 48 tokens", [48], [0.38554])
    assert (engine["name"], engine["x"]) == ("engine: 32 tokens", [32, 32])
    assert (reported["name"], reported["x"], reported["y"]) == ("reported: 19.3 %", [32], [0.19277])
    assert panel.caption.startswith("95 % of what an unlimited cache serves needs 48 tokens, 1.5 × the engine's size:")
    # An engine that does not tell its size has a level line.
    panel = size_panel(measured(records, block_size=16))
    assert panel.figure is not None
    assert [trace["name"] for trace in panel.figure["data"]] == ["LRU", "knee: 48 tokens", "reported: 19.3 %"]
    assert panel.figure["data"][2]["y"] == [0.19277, 0.19277]


@pytest.mark.parametrize(
    ("records", "size"),
    [
        (
            [request("1", 0.0, prompt_tokens=9)],
            "The trace has no block hashes: record it with tap --tokenizer.",
        ),
        (
            [asked("1", 0.0, [1, 2], "a", cached_tokens=0)],
            "No prompt block repeats: a cache of any size has no hit.",
        ),
    ],
)
def test_missing_fields_are_listed(records: list[Record], size: str) -> None:
    result = measured(records, block_size=16)
    panel = size_panel(result)
    assert (panel.missing, panel.figure) == (size, None)
