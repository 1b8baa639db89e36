"""A day out of segments; segments without their manifest."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile.__main__ import main
from tracefile.files.reading import load_trace
from tracefile.records.schema import Engine, HashInfo, Meta, Record, RequestId

DAY_S = 86_400.0
BEGIN_S = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()


def meta(key_id: str, version: str = "0.11") -> Meta:
    return Meta(
        source="tap",
        block_size=16,
        hash=HashInfo(algorithm="xxh3_64", key_id=key_id),
        epoch_unix_ns=int(BEGIN_S * 1e9),
        engine=Engine(name="vllm", version=version),
    )


def record(day: int) -> Record:
    return Record(request_id=RequestId(f"day-{day}"), arrival_ms=1000 * DAY_S * day)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A tap's trace with a segment a day, the fourth being written, beside files of other kinds."""
    (tmp_path / "host-1").mkdir()
    trace = SegmentedTrace(tmp_path / "host-1" / "tap.jsonl", meta("ab"), rotate_bytes=1)
    for day in range(4):
        trace.write(record(day))
        trace.flush()
        if day < 3:
            trace.rotate_if_due()
    (tmp_path / "host-1" / "tap.jsonl.engine.jsonl").write_text("{}\n")
    (tmp_path / "host-1" / "tap.jsonl.summary.json").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("no trace\n")
    return tmp_path


def test_segments_are_joined_and_split_by_time(store: Path) -> None:
    paths = [str(store / "host-1" / f"tap-00000{number}.jsonl") for number in (2, 3)]
    assert main(["convert", *paths, str(store / "cut.jsonl"), "--from", "1h", "--until", "25h"]) == 0
    assert [result.request_id for result in load_trace(store / "cut.jsonl")[1]] == ["day-2"]


def test_segments_without_their_manifest_are_one_trace(store: Path) -> None:
    (store / "host-1" / "tap.segments.json").unlink()
    records = load_trace(store / "host-1")[1]
    assert [record.request_id for record in records] == ["day-0", "day-1", "day-2", "day-3"]
