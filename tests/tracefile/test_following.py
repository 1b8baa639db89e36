"""A trace read while it is written: in every compression, from segment to segment, with lines half written."""

import os
import sys
from pathlib import Path

import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile.files.following import FollowedTrace, wait_for_more
from tracefile.records.schema import Meta, Record, RequestId

META = Meta(source="tap", epoch_unix_ns=0)


def record(number: int) -> Record:
    return Record(request_id=RequestId(f"r{number}"), arrival_ms=float(number), e2e_ms=1.0)


def new(trace: FollowedTrace) -> list[str]:
    return [one.request_id for one in trace.new_records()]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "jsonl.gz"])
@pytest.mark.parametrize("rotate_bytes", [None, 1])
def test_each_record_comes_once_and_in_order(tmp_path: Path, suffix: str, rotate_bytes: int | None) -> None:
    """With ``rotate_bytes`` of 1 each flush ends a segment, so that the reader changes files at every step."""
    path = tmp_path / f"t.{suffix}"
    written = SegmentedTrace(path, META, rotate_bytes=rotate_bytes)
    followed = FollowedTrace(path)
    assert new(followed) == []
    found = []
    for number in range(6):
        written.write(record(number))
        written.flush()
        found += new(followed)
    assert found == [f"r{number}" for number in range(6)]
    assert followed.meta == META
    written.close()
    assert new(followed) == []


def test_half_a_line_waits_for_its_other_half_and_a_bad_one_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("w", buffering=1) as file:
        file.write('{"meta": {"schema": "kvtape/1", "source": "tap"}}\n{"request_id": "a"')
        file.flush()
        followed = FollowedTrace(path)
        assert new(followed) == []
        file.write('}\n{"request_id": 5}\n{"request_id": "b"}\n')
        assert new(followed) == ["a", "b"]
    assert followed.unreadable == 1


def test_a_wait_ends_when_the_parent_closes_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    with open(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert wait_for_more(0.0)
        os.close(theirs)
        assert not wait_for_more(60.0)
