"""Retention on a simulated clock: expired segments are deleted; a wrong clock never deletes the newest segments."""

import os
import time
from pathlib import Path

import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile.analysis.checking import check_trace
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.schema import HashInfo, Meta, Record, RequestId
from tracefile.storage.segments import manifest_path, read_manifest

META = Meta(source="tap", block_size=16, hash=HashInfo(algorithm="xxh3_64", key_id="ab"), epoch_unix_ns=0)
DAY_S = 86_400.0


class Weeks:
    """A trace with a segment a day; ``wall_s`` is the wall clock, which the test may set wrong."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, keep_s: float, *, uploads: bool = False) -> None:
        self.wall_s = 0.0
        monkeypatch.setattr(time, "time", lambda: self.wall_s)
        self.trace = SegmentedTrace(folder / "tap.jsonl", META, rotate_bytes=1, keep_s=keep_s, uploads=uploads)
        self.trace_s = 0.0
        self.day = 0

    def record_a_day(self) -> list[str]:
        """Record the next day as a segment that closes at its end; return the names that retention deletes."""
        self.day += 1
        self.wall_s += DAY_S
        self.trace_s += DAY_S
        self.trace.write(Record(request_id=RequestId(f"day-{self.day}"), arrival_ms=1000 * self.trace_s))
        assert self.trace.flush()
        assert self.trace.rotate_if_due()
        os.utime(self.trace.path.with_name(self.trace.manifest.segments[-1].name), (self.wall_s, self.wall_s))
        return self.trace.delete_expired()

    def jump(self, days: int) -> None:
        """Set both clocks ahead: a restart takes over the trace's clock by the wall clock."""
        self.wall_s += days * DAY_S
        self.trace_s += days * DAY_S

    def days(self) -> list[str]:
        return [record.request_id for record in load_trace(self.trace.path)[1]]


def test_expired_segments_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Weeks(tmp_path, monkeypatch, 30 * DAY_S)
    gone = [name for _ in range(70) for name in tap.record_a_day()]
    assert gone == [f"tap-{number:06}.jsonl" for number in range(1, 40)]
    assert tap.days() == [f"day-{day}" for day in range(40, 71)]
    assert (tap.trace.deleted, tap.trace.recorded) == (39, 70), "what was recorded was recorded"
    tap.trace.check_integrity()
    with open_trace(tmp_path) as reader:
        assert len(list(reader)) == 31
        assert not [warning for warning in reader.warnings if "not there any more" in warning]
    tap.trace.close()
    listed = read_manifest(manifest_path(tap.trace.path)).segments
    assert [segment.deleted for segment in listed] == [True] * 39 + [False] * 31
    resumed = SegmentedTrace(tap.trace.path, META, rotate_bytes=1, resume=True)
    assert (resumed.recorded, resumed.deleted) == (70, 39)
    resumed.close()


def test_clock_jump_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Weeks(tmp_path, monkeypatch, 30 * DAY_S)
    for _ in range(10):
        tap.record_a_day()
    tap.wall_s += 3650 * DAY_S
    assert [name for _ in range(10) for name in tap.record_a_day()] == [], "the trace's own clock is monotonic"


def test_clock_ahead_at_restart_deletes_two_segments_per_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Weeks(tmp_path, monkeypatch, 30 * DAY_S)
    for _ in range(20):
        tap.record_a_day()
    tap.jump(3650)
    assert tap.record_a_day() == ["tap-000001.jsonl", "tap-000002.jsonl"]
    assert tap.record_a_day() == ["tap-000003.jsonl", "tap-000004.jsonl"]
    tap.wall_s -= 3650 * DAY_S
    assert tap.record_a_day() == [], "files know when they were written"


def test_newest_pinned_and_uploading_segments_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Weeks(tmp_path, monkeypatch, DAY_S)
    tap.record_a_day()
    (tmp_path / "tap-000001.jsonl").chmod(0o400)
    tap.jump(900)
    assert tap.record_a_day() == [], "pinned"
    (tmp_path / "tap-000001.jsonl").chmod(0o600)
    tap.trace._uploads = True
    assert tap.record_a_day() == [], "none is uploaded"
    tap.trace.mark_uploaded("tap-000001.jsonl", "s3://b/tap-000001.jsonl")
    assert tap.record_a_day() == ["tap-000001.jsonl"]


def test_trace_with_deleted_segments_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each day's request goes on from the day before's."""
    tap = Weeks(tmp_path, monkeypatch, 0.0)
    for day in (1, 2, 3, 4):
        record = Record(request_id=RequestId(f"turn-{day}"), arrival_ms=1000.0 * day, e2e_ms=100.0)
        if day > 1:
            record.parent_id, record.think_ms = RequestId(f"turn-{day - 1}"), 900.0
        tap.trace.write(record)
        assert tap.trace.flush()
        assert tap.trace.rotate_if_due()
        if day == 3:
            tap.wall_s = time.monotonic() + 1e10
            assert tap.trace.delete_expired() == ["tap-000001.jsonl", "tap-000002.jsonl"]
    tap.trace.close()

    def findings(path: Path) -> list[str]:
        with open_trace(path) as reader:
            return [f"{finding.field}: {finding.problem}" for finding in check_trace(reader)]

    assert findings(tmp_path) == findings(tap.trace.path) == []
    assert findings(tmp_path / "tap-000003.jsonl") == [], "its parent is in an earlier segment"
