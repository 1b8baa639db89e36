"""A trace in segments reads as one, by its folder, its manifest or its name; and what is no such thing is refused."""

from pathlib import Path

import msgspec
import pytest

from tracefile.__main__ import main
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record, RequestId
from tracefile.storage.segments import (
    Manifest,
    Segment,
    manifest_path,
    part_path,
    read_manifest,
    segment_path,
    trace_files,
    write_manifest,
)

META = Meta(source="tap", block_size=16, epoch_unix_ns=1_000)
LATER_ENGINE = msgspec.structs.replace(META, engine=Engine(name="vllm", version="2"))


def record(number: int) -> Record:
    return Record(request_id=RequestId(f"r{number}"), arrival_ms=float(number), e2e_ms=0.5)


def write(path: Path, numbers: range, meta: Meta = META) -> Path:
    with TraceWriter(path, meta) as writer:
        for number in numbers:
            writer.write(record(number))
    return path


def listed(path: Path) -> Segment:
    return Segment(
        name=path.name,
        records=len(load_trace(path)[1]),
        bytes=path.stat().st_size,
        first_arrival_ms=None,
        last_arrival_ms=None,
        digest=trace_digest(path),
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of nine records in three segments, the last of them open and not listed."""
    trace = tmp_path / "captured.jsonl.zst"
    segments = [
        write(segment_path(trace, 1), range(3)),
        write(segment_path(trace, 2), range(3, 5), LATER_ENGINE),
        write(segment_path(trace, 3), range(5, 9), LATER_ENGINE).rename(part_path(segment_path(trace, 3))),
    ]
    manifest = Manifest(epoch_unix_ns=1_000, segments=[listed(path) for path in segments[:2]])
    write_manifest(manifest_path(trace), manifest)
    return trace


def test_segments_read_as_one_trace_by_folder_manifest_or_name(trace: Path) -> None:
    for name in (trace.parent, manifest_path(trace), trace):
        with open_trace(name) as reader:
            assert list(reader) == [record(i) for i in range(9)]
            assert reader.meta == META
            assert reader.latest_meta == LATER_ENGINE
            assert reader.warnings == []


def test_errors_have_the_line_in_the_segment(trace: Path) -> None:
    with open_trace(trace) as reader:
        positions = {str(result.request_id): reader.where() for result in reader}
        assert positions["r2"] == f"{segment_path(trace, 1)}:4"
        assert positions["r3"] == f"{segment_path(trace, 2)}:2"
        assert positions["r8"] == f"{part_path(segment_path(trace, 3))}:5"
        assert [reader.where(line) for line in (4, 5, 6)] == [
            f"{segment_path(trace, 1)}:4",
            f"{segment_path(trace, 2)}:1",
            f"{segment_path(trace, 2)}:2",
        ]


def test_digest_does_not_depend_on_segments(trace: Path, tmp_path: Path) -> None:
    complete = write(tmp_path / "whole.jsonl", range(9))
    assert trace_digest(trace.parent) == trace_digest(complete) == trace_digest(manifest_path(trace))


def test_torn_segment_loses_one_line_and_the_next_is_read(trace: Path) -> None:
    first = segment_path(trace, 1)
    plain = Path(str(first).removesuffix(".zst"))
    plain.write_bytes(b'{"meta":{"schema":"kvtape/1","source":"tap","block_size":16,"epoch_unix_ns":1000}}\n')
    with plain.open("ab") as file:
        file.write(b'{"request_id":"r0","arrival_ms":0.0,"e2e_ms":0.5}\n{"request_id":"r1","arr')
    first.unlink()
    with open_trace(trace.parent) as reader:
        assert [result.request_id for result in reader] == ["r3", "r4", "r0", "r5", "r6", "r7", "r8"]
        assert f"{plain}:3: torn last line" in reader.warnings[-1]


def test_segment_closed_during_reading_is_opened_by_its_new_name(trace: Path) -> None:
    with open_trace(trace) as reader:
        assert next(reader) == record(0)
        part_path(segment_path(trace, 3)).rename(segment_path(trace, 3))
        assert list(reader) == [record(i) for i in range(1, 9)]


def test_folder_without_exactly_one_trace_is_rejected(trace: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        InputError, match="is empty; expected segments: a tap writes the first after it reaches its engi"
    ):
        open_trace(empty)
    (empty / "notes.txt").touch()
    with pytest.raises(InputError, match="without segments"):
        open_trace(empty)
    write(segment_path(trace.with_name("other.jsonl"), 1), range(2))
    with pytest.raises(InputError, match="segments of captured and other"):
        open_trace(tmp_path)
    assert len(load_trace(manifest_path(trace))[1]) == 9
    for file in trace_files(trace):
        Path(file).unlink()
    with pytest.raises(InputError, match="all its segments are missing"):
        open_trace(trace)


def test_a_manifest_is_checked(trace: Path) -> None:
    path = manifest_path(trace)
    path.write_text('{"schema": "kvtape-segments/9", "segments": []}')
    with pytest.raises(InputError, match="kvtape-segments/9"):
        open_trace(trace.parent)
    path.write_text('{"segments": [{"name": 1}]}')
    with pytest.raises(InputError, match="expected a manifest"):
        read_manifest(path)
    path.write_text('{"segments": ' + "[" * 100_000)
    with pytest.raises(InputError, match="expected a manifest"):
        read_manifest(path)


@pytest.mark.parametrize("name", ["", "..", "../other.jsonl", "/etc/passwd", "a\0b", "a" * 256])
def test_manifest_refers_to_its_folder_only(trace: Path, name: str) -> None:
    path = manifest_path(trace)
    result = msgspec.json.decode(path.read_bytes())
    result["segments"][0]["name"] = name
    path.write_bytes(msgspec.json.encode(result))
    with pytest.raises(InputError, match=r"segments: name: .*; expected a file's name"):
        open_trace(trace.parent)


def test_segments_are_joined_by_time(trace: Path, tmp_path: Path) -> None:
    parts = [str(segment_path(trace, number)) for number in (2, 1)]
    joined = tmp_path / "joined.jsonl"
    assert main(["convert", *parts, str(joined)]) == 0
    assert [result.request_id for result in load_trace(joined)[1]] == ["r0", "r1", "r2", "r3", "r4"]
