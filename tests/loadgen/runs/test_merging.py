"""Parts of a run as one trace: order, and requests in flight."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.runs.merging import InFlight, Times, merge_parts, part_path, part_paths
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId

META = Meta(source="client", model="m", epoch_unix_ns=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def record(name: str, arrival_ms: float, e2e_ms: float, concurrency: int = 1) -> Record:
    return Record(request_id=RequestId(name), arrival_ms=arrival_ms, e2e_ms=e2e_ms, concurrency=concurrency)


def write(path: Path, records: Sequence[Record]) -> Path:
    with TraceWriter(path, META) as writer:
        for each in records:
            writer.write(each)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "t.jsonl.gz"])
def test_parts_merge_in_finish_order(folder: Path, name: str) -> None:
    trace = folder / name
    parts = [
        write(part_path(trace, 0), [record("a", 0, 10), record("b", 5, 25)]),
        write(part_path(trace, 1), [record("c", 1, 2), record("d", 6, 6), record("e", 31, 1)]),
    ]
    assert part_paths(trace) == parts
    assert merge_parts(trace, parts, META) == 5
    meta, records = load_trace(trace)
    assert meta == META
    # c ends at 3, a at 10, d at 12, b at 30, e at 32; each part's own count saw no other part's requests.
    assert [(each.request_id, each.concurrency) for each in records] == [
        ("c", 2),
        ("a", 1),
        ("d", 3),
        ("b", 2),
        ("e", 1),
    ]
    assert os.listdir(folder) == [name]


def test_parts_stay_until_the_merged_trace_is_there(folder: Path) -> None:
    trace = folder / "t.jsonl"
    part = write(part_path(trace, 0), [record("a", 0, 10)])
    trace.mkdir()  # what cannot be replaced by a file
    with pytest.raises(InputError, match="is a directory; expected a file to write"):
        merge_parts(trace, [part], META)
    assert sorted(os.listdir(folder)) == ["t.jsonl", "t.jsonl.part0.jsonl"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=30))
def test_concurrency_counts_requests_in_flight(spans: list[tuple[int, int]]) -> None:
    # Distinct times, so that nobody comes as another one goes.
    times = [(arrival + index / 100, e2e + 0.001) for index, (arrival, e2e) in enumerate(spans)]
    in_flight = InFlight([arrival for arrival, _ in times], [arrival + e2e for arrival, e2e in times])
    for arrival, e2e in times:
        there = sum(other <= arrival < other + length for other, length in times)
        assert in_flight.at_arrival(Times(arrival, e2e)) == there
