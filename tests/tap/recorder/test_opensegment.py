"""A trace file that others delete, move or change while it is written: noticed, counted, and recording goes on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tap.recorder.recorder import Recorder
from tap.recorder.segments import SegmentedTrace
from tests.tap.recorder.test_recorder import exchange, setup, tokens
from tests.tap.recorder.test_segments import META, SUFFIXES, ids, write
from tracefile.files.reading import load_trace
from tracefile.storage.segments import manifest_path, part_path, read_manifest, segment_path


@pytest.fixture(params=SUFFIXES)
def path(request: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder / f"captured{request.param}"


def open_file(path: Path, rotate: int | None) -> Path:
    return path if rotate is None else part_path(segment_path(path, 1))


def named(start: int, end: int) -> list[str]:
    return [f"r{number}" for number in range(start, end)]


def move(file: Path) -> None:
    file.rename(file.parent.parent / "moved")


def move_folder(file: Path) -> None:
    file.parent.rename(file.parent.parent / "there")


def replace(file: Path) -> None:
    (file.parent / "other").write_text("another's\n" * 1000)
    (file.parent / "other").rename(file)


def cut(file: Path) -> None:
    os.truncate(file, 0)


def overwrite(file: Path) -> None:
    file.write_text("another's\n" * 1000)


def cut_within(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("rotate", [None, 1 << 20])
@pytest.mark.parametrize("harm", [Path.unlink, move, move_folder, cut, cut_within, overwrite])
def test_recording_continues_in_a_new_file(path: Path, harm: Callable[[Path], None], rotate: int | None) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=rotate)
    write(trace, range(5))
    assert trace.flush()
    trace.replace_lost_file()
    assert trace.lost_files() == [], "nothing happened to it"
    harm(open_file(path, rotate))
    there = open_file(path, rotate).exists()
    left = open_file(path, rotate).read_bytes() if there else None
    assert trace.flush()
    trace.check_integrity()
    [lost] = trace.lost_files()
    assert (lost.records, trace.recorded) == (5, 0)
    assert "5 RECORDS ARE LOST; recording continues in a new file" in str(lost)
    write(trace, range(5, 10))
    assert trace.close()
    trace.check_integrity()
    assert ids(path.parent if rotate else path) == named(5, 10)
    if rotate is not None:
        assert [segment.records for segment in read_manifest(manifest_path(path)).segments] == [5]
    aside = Path(f"{open_file(path, rotate)}.lost")
    assert (aside.read_bytes() if aside.exists() else None) == left, "what was left of it"


@pytest.mark.parametrize("harm", [Path.unlink, move, cut])
def test_segment_lost_while_closing_does_not_block_the_next(
    path: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=1)
    write(trace, range(2))
    trace.flush()
    end, harms = SegmentedTrace._end_segment, [harm]

    def end_late(self: SegmentedTrace) -> None:
        end(self)
        if harms:
            harms.pop()(open_file(path, 1))

    monkeypatch.setattr(SegmentedTrace, "_end_segment", end_late)
    trace.rotate_if_due()
    assert trace.flush()
    trace.check_integrity()
    write(trace, range(2, 4))
    assert trace.close()
    gone = [lost.records for lost in trace.lost_files()]
    remaining = [segment.records for segment in read_manifest(manifest_path(path)).segments]
    assert (sum(remaining) + sum(gone), ids(path.parent)[-2:]) == (4, ["r2", "r3"])


# The recorder's account of it.


def record(recorder: Recorder, numbers: range) -> None:
    for number in numbers:
        recorder.record(exchange(tokens(8, 100 * number), number))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "captured.jsonl.zst"


@pytest.mark.parametrize("rotate", [None, 1 << 20])
def test_lost_records_count_as_dropped(trace: Path, rotate: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    first = Recorder(setup(trace, rotate_bytes=rotate))
    record(first, range(4))
    first.close()
    recorder = Recorder(setup(trace, rotate_bytes=rotate, resume=True))
    record(recorder, range(4, 10))
    recorder.tick()
    reported = recorder.progress()
    assert reported is not None
    assert (reported.earlier_records, reported.recorded, reported.hashed) == (4, 6, 6)
    file = trace if rotate is None else part_path(segment_path(trace, 2))
    file.unlink()
    recorder.tick()
    reported = recorder.progress()
    assert reported is not None, "noticed without any traffic"
    assert (reported.recorded, reported.hashed, reported.received, reported.dropped) == (0, 0, 6, {"trace_lost": 6})
    assert reported.earlier_records == (0 if rotate is None else 4), "what was in the file before is gone with it"
    assert f"{10 if rotate is None else 6} RECORDS ARE LOST; recording continues in" in capsys.readouterr().err
    record(recorder, range(10, 13))
    recorder.tick()
    file = trace if rotate is None else part_path(segment_path(trace, 3))
    file.rename(trace.with_name("away.zst"))
    recorder.tick()
    reported = recorder.progress()
    assert reported is not None
    assert (reported.recorded, reported.dropped) == (0, {"trace_lost": 9})
    record(recorder, range(13, 15))
    reported = recorder.close()
    assert (reported.recorded, reported.hashed, reported.received, reported.dropped) == (2, 2, 11, {"trace_lost": 9})
    assert len(load_trace(trace)[1]) == (2 if rotate is None else 6)


@pytest.mark.parametrize("rotate", [None, 1 << 20])
def test_restarted_recorder_does_not_count_lost_records(trace: Path, rotate: int | None) -> None:
    recorder = Recorder(setup(trace, rotate_bytes=rotate))
    record(recorder, range(3))
    recorder.tick()
    file = trace if rotate is None else part_path(segment_path(trace, 1))
    os.truncate(file, file.stat().st_size - 1)  # two records can be read still
    record(recorder, range(3, 7))
    recorder.tick()
    carried = recorder.progress()
    assert carried is not None
    assert (carried.recorded, carried.dropped) == (0, {"trace_lost": 7})
    recorder._trace._segment.file.abandon()  # type: ignore[union-attr]  # killed
    again = Recorder(setup(trace, rotate_bytes=rotate, resume=True, carry=carried))
    record(again, range(7, 9))
    reported = again.close()
    assert (reported.recorded, reported.received, reported.dropped) == (2, 9, {"trace_lost": 7})
    assert len(load_trace(trace)[1]) == 2
