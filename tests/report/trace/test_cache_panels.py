"""Figures of what the prefix cache does: literal boxes, the curve's marks, points and the line."""

from typing import Any

import pytest

from measure.cache.prefixtree import PrefixNode, PrefixTree
from measure.metrics.trace import measure_run, study_chains
from report.trace.cache import size_panel
from report.trace.measured import Measured
from report.trace.prefixes import left_edges, prefix_figure, prefix_panel, prefix_table
from tests.measure.metrics.made import request, run_of
from tests.measure.metrics.test_prefixcache import asked
from tracefile import Engine, Record


def measured(records: list[Record], **meta: Any) -> Measured:
    run = run_of(records, **meta)
    study = study_chains(run)
    return Measured(run, measure_run(run, study=study), study)


def node(parent: int | None, own: int, below: int, **fields: Any) -> PrefixNode:
    given: dict[str, Any] = {
        "name": "0123abcd",
        "prefixes": 1,
        "from_tokens": 0,
        "to_tokens": 10,
        "requests": 4,
        "sessions": 2,
    }
    return PrefixNode(parent=parent, saved_tokens=own, below_tokens=below, served_tokens=own // 2, **given | fields)


TREE = PrefixTree(
    nodes=[
        node(None, 60, 90),
        node(0, 10, 10, from_tokens=10, to_tokens=15, sessions=1),
        node(0, 15, 15, from_tokens=10, to_tokens=20, sessions=1),
        node(0, 5, 5, name="", prefixes=3, sessions=None, from_tokens=10, to_tokens=12),
        node(None, 30, 30),
    ],
    saved_tokens=120,
    own_session_tokens=80,
)


def test_children_stand_under_their_parent_the_largest_first_and_sums_last() -> None:
    assert left_edges(TREE) == [0, 15, 0, 25, 90]
    drawn = {trace["name"]: trace for trace in prefix_figure(TREE)["data"]}
    shared, own, rest = drawn.values()
    assert list(drawn) == ["shared by several sessions", "in one session only", "smaller prefixes together"]
    assert (shared["x"], shared["width"]) == ([45.0, 105.0], [90, 30])
    assert (own["x"], own["width"]) == ([20.0, 7.5], [10, 15])
    assert (own["base"], own["y"]) == ([10, 10], [5, 10])
    assert (rest["x"], rest["width"], rest["text"]) == ([27.5], [5], [""])
    assert shared["text"][0] == "10 tokens<br>× 4 requests"
    assert shared["customdata"][0] == (
        "prompt tokens 0 to 10, hash 0123abcd…<br>4 requests of 2 sessions<br>saves 60 tokens (50.0 %)"
        "<br>with all below 90 tokens (75.0 %)<br>the engine served 50.0 % of its own"
    )
    assert prefix_table(TREE).rows[0] == ["0123abcd", "0–10", "4", "2", "60", "50.0 %", "50.0 %"]
    assert len(prefix_table(TREE).rows) == 4


def test_the_curve_with_its_knee_the_engines_size_and_its_own_rate() -> None:
    records = [
        asked(name, at_ms, blocks, name[0], cached_tokens=cached)
        for name, at_ms, blocks, cached in (("a1", 0.0, [1, 2], 0), ("b1", 10.0, [3], 0), ("a2", 20.0, [1, 2], 16))
    ]
    found = measured(records, block_size=16, engine=Engine(num_gpu_blocks=3))
    panel = size_panel(found)
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
    ("records", "prefixes", "size"),
    [
        (
            [request("1", 0.0, prompt_tokens=9)],
            "The trace has no block hashes.",
            "The trace has no block hashes: record it with tap --tokenizer.",
        ),
        (
            [asked("1", 0.0, [1, 2], "a", cached_tokens=0)],
            "No block of a prompt came before: there is no prefix to share.",
            "No block of a prompt came before: a cache of any size serves nothing.",
        ),
        (
            [asked("1", 0.0, [1, 2], "a"), asked("2", 5.0, [3, 2], "a")],
            "Its block hashes are not chained: one follows different blocks.",
            "No block of a prompt came before: a cache of any size serves nothing.",
        ),
    ],
)
def test_what_the_trace_lacks(records: list[Record], prefixes: str, size: str) -> None:
    found = measured(records, block_size=16)
    panels = [prefix_panel(found), size_panel(found)]
    assert [(panel.missing, panel.figure) for panel in panels] == [(prefixes, None), (size, None)]
