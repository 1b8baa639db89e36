"""A trace file that others delete, move or change while it is written: noticed, counted, and recording goes on."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tap.recorder.recorder import Recorder
from tap.recorder.segments import SegmentedTrace
from tap.supervisor.account import Account
from tests.tap.recorder.test_recorder import exchange, setup, tokens
from tests.tap.recorder.test_segments import META, SUFFIXES, ids, record, write
from tracefile import load_trace, open_trace
from tracefile.storage.segments import manifest_path, part_path, read_manifest, segment_path

LINE_BYTES = 400


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


@pytest.mark.parametrize("rotate", [None, 1 << 20])
@pytest.mark.parametrize(
    ("harm", "was"),
    [
        (Path.unlink, "deleted"),
        (move, "moved"),
        (move_folder, "moved"),
        (replace, "deleted"),
        (cut, "changed"),
        (overwrite, "changed"),
    ],
)
def test_recording_goes_on_in_a_new_file_and_the_counts_are_those_of_the_files(
    path: Path, harm: Callable[[Path], None], was: str, rotate: int | None
) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=rotate)
    write(trace, range(5))
    assert trace.flush()
    trace.follow()
    assert trace.left_files() == [], "nothing happened to it"
    write(trace, range(5, 7))
    harm(open_file(path, rotate))
    assert trace.flush()
    trace.check_integrity()
    [left] = trace.left_files()
    moved = was == "moved"
    assert (left.was, left.lost, left.moved) == ((was, 0, 7) if moved else (was, 5, 0)), "two were in memory still"
    assert trace.recorded == (0 if moved else 2)
    write(trace, range(7, 10))
    assert trace.close()
    trace.check_integrity()
    assert left.successor is not None
    there = Path(left.successor.removesuffix(".part"))
    meta, records = load_trace(there)
    assert (meta, [found.request_id for found in records]) == (META, named(7 if moved else 5, 10))
    if rotate is not None:
        assert [segment.records for segment in read_manifest(manifest_path(path)).segments] == [len(records)]
    elif harm in (replace, overwrite):
        assert (there, path.read_text()) == (segment_path(path, 1), "another's\n" * 1000), "what is not ours stays"
    else:
        assert there == path, "its own name is free"
    if moved:
        assert ids(Path(left.present_path)) == named(0, 7)
        with open_trace(left.present_path) as reader:
            assert (list(map(str, reader.warnings)), len(list(reader)), reader.warnings) == ([], 7, []), "it has an end"


@pytest.mark.parametrize("rotate", [None, 1 << 20])
def test_a_file_cut_within_keeps_its_first_records(path: Path, rotate: int | None) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=rotate)
    for number in range(6):
        trace.write(record(number, LINE_BYTES))
        trace.flush()
    file = open_file(path, rotate)
    os.truncate(file, file.stat().st_size - LINE_BYTES // 4)
    write(trace, range(6, 8))
    assert trace.flush()
    trace.check_integrity()
    [left] = trace.left_files()
    assert (left.kept + left.lost, left.lost > 0, left.kept > 1) == (6, True, True)
    assert trace.recorded == left.kept + 2
    trace.close()
    assert ids(path.parent if rotate else path) == [*named(0, left.kept), "r6", "r7"]


@pytest.mark.parametrize("harm", [Path.unlink, move, cut])
def test_a_segment_that_goes_while_it_ends_does_not_hold_up_the_next(
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
    gone = [left.lost + left.moved for left in trace.left_files()]
    kept = [segment.records for segment in read_manifest(manifest_path(path)).segments]
    assert (sum(kept) + sum(gone), ids(path.parent)[-2:]) == (4, ["r2", "r3"])


def test_a_file_that_becomes_another_trace_is_left_alone(path: Path) -> None:
    other = SegmentedTrace(
        path.with_name(f"other{''.join(path.suffixes)}"), msgspec.structs.replace(META, epoch_unix_ns=5)
    )
    write(other, range(50, 90))
    other.close()
    content = other.path.read_bytes()
    trace = SegmentedTrace(path, META)
    write(trace, range(2))
    trace.flush()
    path.write_bytes(content)
    write(trace, range(2, 4))
    assert trace.close()
    assert path.read_bytes() == content
    assert ids(segment_path(path, 1)) == ["r2", "r3"]


def test_no_file_can_be_opened_until_the_folder_can_be_made_again(path: Path) -> None:
    trace = SegmentedTrace(path, META)
    write(trace, range(2))
    trace.flush()
    path.parent.rename(path.parent.with_name("there"))
    path.parent.write_text("in the way")
    assert not trace.flush()
    assert trace.failing
    [left] = trace.left_files()
    assert (left.moved, left.lost, left.successor) == (2, 0, None)
    assert str(left).endswith("recording goes on once it can be written")
    path.parent.unlink()
    path.parent.mkdir()
    assert trace.flush()
    write(trace, range(2, 4))
    assert trace.close()
    assert ids(path) == ["r2", "r3"]


def test_a_device_is_no_file_that_could_be_lost() -> None:
    trace = SegmentedTrace("/dev/null", META)
    write(trace, range(2))
    assert trace.flush()
    assert (trace.left_files(), trace.recorded) == ([], 2)
    trace.close()


# The recorder's account of it.


def take(recorder: Recorder, numbers: range) -> None:
    for number in numbers:
        recorder.take(exchange(tokens(8, 100 * number), number))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "captured.jsonl.zst"


@pytest.mark.parametrize("rotate", [None, 1 << 20])
def test_lost_records_are_dropped_ones_and_moved_records_are_recorded(
    trace: Path, rotate: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Recorder(setup(trace, rotate_bytes=rotate))
    take(first, range(4))
    first.close()
    recorder = Recorder(setup(trace, rotate_bytes=rotate, resume=True))
    take(recorder, range(4, 10))
    told = recorder.tick()
    assert told is not None
    assert (told.found, told.recorded, told.hashed) == (4, 6, 6)
    file = trace if rotate is None else part_path(segment_path(trace, 2))
    file.unlink()
    told = recorder.tick()
    assert told is not None, "noticed without any traffic"
    assert (told.recorded, told.hashed, told.received, told.dropped) == (0, 0, 6, {"trace_lost": 6})
    assert told.found == (0 if rotate is None else 4), "what was in the file before is gone with it"
    assert f"{10 if rotate is None else 6} RECORDS ARE LOST; recording goes on in" in capsys.readouterr().err
    take(recorder, range(10, 13))
    recorder.tick()
    file = trace if rotate is None else part_path(segment_path(trace, 3))
    file.rename(trace.with_name("away.zst"))
    told = recorder.tick()
    assert told is not None
    assert (told.recorded, told.moved, told.dropped) == (3, 3, {"trace_lost": 6})
    assert (
        Account(offered=9, recorded=3, moved=3)
        .line()
        .startswith("3 of 9 requests recorded (3 in files that were moved")
    )
    take(recorder, range(13, 15))
    told = recorder.close()
    assert (told.recorded, told.hashed, told.received, told.dropped) == (5, 5, 11, {"trace_lost": 6})
    assert len(ids(trace.with_name("away.zst"))) == 3
    assert len(load_trace(trace)[1]) == (2 if rotate is None else 6)


def test_a_recorder_started_again_knows_what_left_before_it(trace: Path) -> None:
    recorder = Recorder(setup(trace))
    take(recorder, range(3))
    recorder.tick()
    trace.rename(trace.with_name("away.zst"))
    recorder.tick()
    trace.unlink()
    trace.write_text("another's\n")
    take(recorder, range(3, 7))
    carried = recorder.tick()
    assert carried is not None
    assert (carried.recorded, carried.moved) == (7, 3)
    assert carried.file == str(segment_path(trace, 1))
    recorder._trace._segment.file.abandon()  # type: ignore[union-attr]  # killed
    again = Recorder(setup(trace, resume=True, carry=carried))
    take(again, range(7, 9))
    told = again.close()
    assert (told.recorded, told.dropped) == (9, {})
    assert len(ids(segment_path(trace, 1))) == 6


def test_a_file_that_went_while_no_recorder_was_there_is_accounted_for(trace: Path) -> None:
    recorder = Recorder(setup(trace))
    take(recorder, range(3))
    carried = recorder.tick()
    assert carried is not None
    recorder._trace._segment.file.abandon()  # type: ignore[union-attr]  # killed
    trace.unlink()
    again = Recorder(setup(trace, resume=True, carry=carried))
    take(again, range(3, 5))
    told = again.close()
    assert (told.recorded, told.hashed, told.received, told.dropped) == (2, 2, 5, {"trace_lost": 3})
