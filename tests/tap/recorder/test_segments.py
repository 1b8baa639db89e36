"""The trace on disk: rotation, resumption after any cut, disks that fill up; what is counted is what the files hold."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap.recorder.segments import SegmentedTrace
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta, Record, RequestId
from tracefile.storage.segments import manifest_path, part_path, read_manifest, segment_path, segments_there

ROOT = Path(__file__).parent.parent.parent.parent
META = Meta(source="tap", block_size=16, hash=HashInfo(algorithm="xxh3_64", key_id="ab"), epoch_unix_ns=1_000)
LATER = msgspec.structs.replace(META, epoch_unix_ns=9_000)
SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


def record(number: int, filler: int = 40) -> Record:
    noise = (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big").hex() * (filler // 16 + 1)
    return Record(request_id=RequestId(f"r{number}"), arrival_ms=float(number), extra={"filler": noise[:filler]})


def ids(path: Path) -> list[str]:
    return [actual.request_id for actual in load_trace(path)[1]]


def write(trace: SegmentedTrace, numbers: range, filler: int = 40) -> None:
    for number in numbers:
        trace.write(record(number, filler))


@pytest.fixture(params=SUFFIXES)
def path(request: Any, tmp_path: Path) -> Path:
    return tmp_path / f"captured{request.param}"


def test_single_file_without_rotation(path: Path) -> None:
    trace = SegmentedTrace(path, META)
    assert load_trace(path) == (META, []), "the header is there at once"
    write(trace, range(5))
    assert (trace.recorded, trace.segments) == (0, 1), "nothing of it is in the file yet"
    assert trace.flush()
    assert (trace.recorded, ids(path)) == (5, [f"r{i}" for i in range(5)])
    assert not trace.rotate_if_due()
    assert trace.close()
    assert trace.close(), "closing twice is harmless"
    assert trace.segments == 1
    assert os.listdir(path.parent) == [path.name]


def test_rotation_by_size(path: Path) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=600)
    for number in range(30):
        trace.write(record(number))
        trace.flush()
        trace.rotate_if_due()
    assert part_path(segment_path(path, trace.segments)).exists(), "the open one says so by its name"
    assert trace.close()
    manifest = read_manifest(manifest_path(path))
    assert len(manifest.segments) > 2
    assert manifest.epoch_unix_ns == META.epoch_unix_ns
    start = 0
    for number, segment in enumerate(manifest.segments, 1):
        file = segment_path(path, number)
        assert (segment.name, segment.bytes) == (file.name, file.stat().st_size)
        assert (number == len(manifest.segments)) or segment.bytes >= 600, "compressed bytes count"
        meta, records = load_trace(file)
        assert meta == META
        assert records == [record(i) for i in range(start, start + segment.records)]
        assert (segment.first_arrival_ms, segment.last_arrival_ms) == (start, start + segment.records - 1)
        assert (segment.digest, segment.uploaded) == (trace_digest(file), None)
        start += segment.records
    assert start == 30 == trace.recorded
    assert ids(path.parent) == [f"r{i}" for i in range(30)]
    assert not list(path.parent.glob("*.part"))


def test_rotation_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tap.recorder.segments.time.monotonic", lambda: now[0])
    trace = SegmentedTrace(tmp_path / "a.jsonl", META, rotate_s=60)
    now[0] += 1000
    assert not trace.rotate_if_due(), "nothing was recorded"
    write(trace, range(2))
    trace.flush()
    now[0] += 59
    assert not trace.rotate_if_due(), "its age counts from its first record"
    now[0] += 1
    assert trace.rotate_if_due()
    assert ids(segment_path(trace.path, 1)) == ["r0", "r1"]
    assert not trace.rotate_if_due()
    trace.close()


def test_existing_trace_is_not_overwritten(path: Path) -> None:
    for rotate in (None, 1):
        trace = SegmentedTrace(path, META, rotate_bytes=rotate)
        write(trace, range(3))
        trace.flush()
        trace.rotate_if_due()
        trace.close()
        with pytest.raises(InputError, match="already"):
            SegmentedTrace(path, META, rotate_bytes=rotate)
        SegmentedTrace(path, LATER, rotate_bytes=rotate, overwrite=True).close()
        assert load_trace(path if rotate is None else manifest_path(path)) == (LATER, [])


# Resumption.

commands = st.lists(
    st.one_of(st.integers(0, 300), st.sampled_from(["flush", "rotate"])),
    max_size=30,
)
"""What a writer did before it was killed; a number: it took a record with so much filler."""


def killed_after(path: Path, commands: list[int | str], rotate_bytes: int | None) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=rotate_bytes)
    for number, command in enumerate(commands):
        if command == "flush":
            trace.flush()
        elif command == "rotate":
            trace.rotate_if_due()
        else:
            assert isinstance(command, int)
            trace.write(record(number, command))
        trace.check_integrity()
    die(trace)


def die(trace: SegmentedTrace) -> None:
    """What becomes of a writer's open file when it is killed: nothing more is written, and it is closed."""
    assert trace._segment is not None
    trace._segment.file.abandon()


def readable(path: Path) -> list[str]:
    """What a reader gets of files that may be torn: the oracle."""
    try:
        with open_trace(path) as reader:
            return [actual.request_id for actual in reader]
    except InputError:
        return []  # not even the first header survived


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=60)
@given(commands=commands, rotates=st.booleans(), share=st.floats(0, 1))
def test_truncated_trace_resumes_with_its_complete_records(
    suffix: str, commands: list[int | str], rotates: bool, share: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"captured{suffix}"
        rotate_bytes = 300 if rotates else None
        killed_after(path, commands, rotate_bytes)
        last = segments_there(path)[-1] if rotates else path
        last.write_bytes(last.read_bytes()[: round(share * last.stat().st_size)])
        survived = readable(path)
        trace = SegmentedTrace(path, LATER, rotate_bytes=rotate_bytes, resume=True)
        trace.check_integrity()
        assert trace.recorded == len(survived)
        assert [actual.request_id for actual in trace.last_records(1000)] == survived
        trace.write(record(1000))
        assert trace.close()
        assert trace.recorded == len(survived) + 1
        meta, records = load_trace(path)
        assert [actual.request_id for actual in records] == [*survived, "r1000"]
        assert meta == (META if survived else trace.meta), "what goes on is on the old clock"
        if rotates:
            check_manifest(path, len(records))


def check_manifest(path: Path, records: int) -> None:
    manifest = read_manifest(manifest_path(path))
    assert sum(segment.records for segment in manifest.segments) == records
    assert [path.with_name(segment.name) for segment in manifest.segments] == segments_there(path)
    for segment in manifest.segments:
        file = path.with_name(segment.name)
        assert (segment.bytes, segment.digest) == (file.stat().st_size, trace_digest(file))


def test_trace_with_a_writer_is_not_resumed(path: Path) -> None:
    for rotate in (None, 1):
        trace = SegmentedTrace(path, META, rotate_bytes=rotate)
        write(trace, range(3))
        trace.flush()
        with pytest.raises(InputError, match="another process is writing to it"):
            SegmentedTrace(path, LATER, rotate_bytes=rotate, resume=True)
        write(trace, range(3, 5))
        assert trace.close()
        assert len(load_trace(path if rotate is None else manifest_path(path))[1]) == 5


def test_resume_requires_equal_blocks_and_hashes(path: Path) -> None:
    for rotate in (None, 1):
        trace = SegmentedTrace(path, META, rotate_bytes=rotate)
        write(trace, range(2))
        trace.close()
        for changed, printed in (
            ({"block_size": 8}, "--resume .*meta.block_size"),
            ({"hash": HashInfo(algorithm="xxh3_64", key_id="other")}, "--resume .*meta.hash"),
        ):
            with pytest.raises(InputError, match=printed):
                SegmentedTrace(path, msgspec.structs.replace(LATER, **changed), rotate_bytes=rotate, resume=True)
        assert len(load_trace(path if rotate is None else manifest_path(path))[1]) == 2


def test_lost_manifest_is_rebuilt(path: Path) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=1)
    for number in range(3):
        trace.write(record(number))
        trace.flush()
        trace.rotate_if_due()
    trace.close()
    before = read_manifest(manifest_path(path)).segments
    manifest_path(path).unlink()
    resumed = SegmentedTrace(path, LATER, rotate_bytes=1, resume=True)
    assert resumed.recorded == 3
    assert resumed.manifest.segments == [segment for segment in before if segment.records]
    resumed.close()


def test_moved_segments_still_count(path: Path) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=1)
    for number in range(3):
        trace.write(record(number))
        trace.flush()
        trace.rotate_if_due()
    trace.mark_uploaded(segment_path(path, 1).name, "s3://b/1")
    trace.close()
    for file in segments_there(path):
        file.unlink()
    resumed = SegmentedTrace(path, LATER, rotate_bytes=1, resume=True)
    assert (resumed.recorded, resumed.meta) == (3, META), "the manifest knows the clock too"
    assert resumed.manifest.segments[0].uploaded == "s3://b/1"
    resumed.write(record(9))
    assert resumed.close()
    assert load_trace(path) == (META, [record(9)])


# Disks that fill up.


class Disk:
    """``os.write`` with so many bytes of room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.space: float = float("inf")
        self._write = os.write
        monkeypatch.setattr("os.write", self.write)

    def write(self, fd: int, data: Any) -> int:
        if self.space <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        consumed = int(min(len(data), self.space))
        self.space -= consumed
        return self._write(fd, bytes(data[:consumed]))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("rotate", [None, 500])
def test_full_disk_loses_only_rejected_lines(path: Path, disk: Disk, rotate: int | None) -> None:
    trace = SegmentedTrace(path, META, rotate_bytes=rotate)
    consumed: list[str] = []
    refused = 0
    for number in range(60):
        if number % 12 == 6:
            disk.space = number  # a few bytes more, and then none: a torn line, for now
        if number % 12 == 11:
            disk.space = float("inf")
        if trace.failing:
            with pytest.raises(InputError, match="No space left"):
                trace.write(record(number))
            refused += 1
        else:
            trace.write(record(number))
            consumed.append(f"r{number}")
        before = trace.recorded
        trace.check_integrity()
        if not trace.flush():
            assert trace.failing
            assert trace.recorded == before, "what is not in the file is not counted"
        trace.rotate_if_due()
    disk.space = float("inf")
    assert trace.close()
    assert trace.recorded == len(consumed) == 60 - refused
    assert refused > 0
    assert ids(path) == consumed
