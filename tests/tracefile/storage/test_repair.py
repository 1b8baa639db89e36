"""Mending: whatever cut a file, what a reader could still read of it is what stays, and the file is whole again."""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.encoding import encode_meta, encode_record
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId
from tracefile.storage.appending import append_to
from tracefile.storage.repair import repair

META = Meta(source="tap", block_size=16, epoch_unix_ns=7)
SUFFIXES = ["", ".gz", ".zst"]

lengths = st.integers(0, 60) | st.integers(0, 300_000)
sizes = st.lists(st.tuples(lengths, st.booleans()), max_size=8)
"""A record each: the length of its filler, and whether the writer flushed after it."""


def record(number: int, filler: int = 0) -> Record:
    noise = (number + 1).to_bytes(8, "big").hex() * (filler // 16 + 1)
    return Record(request_id=RequestId(f"r{number}"), arrival_ms=float(number), extra={"filler": noise[:filler]})


def write(path: Path, filled: list[tuple[int, bool]]) -> list[Record]:
    with TraceWriter(path, META) as writer:
        for number, (filler, flush) in enumerate(filled):
            writer.write(record(number, filler))
            if flush:
                writer.flush()
    return load_trace(path)[1]


def readable(path: Path) -> list[Record]:
    """What a reader gets of a file that may be torn: the oracle."""
    try:
        with open_trace(path) as reader:
            return list(reader)
    except InputError:
        return []  # not even the header survived


def go_on(path: Path, more: list[Record]) -> None:
    file = append_to(path)
    if not path.stat().st_size:
        file.add(encode_meta(META))
    file.add(b"".join(encode_record(record) for record in more))
    file.finish()
    file.abandon()


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=60)
@given(filled=sizes, share=st.floats(0, 1))
def test_repair_keeps_exactly_the_complete_records(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, filled: list[tuple[int, bool]], share: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / f"a.jsonl{suffix}"
    written = write(path, filled)
    complete = path.read_bytes()
    path.write_bytes(complete[: round(share * len(complete))])
    survived = readable(path)
    assert survived == written[: len(survived)]
    repaired = repair(path)
    assert repaired.records == len(survived)
    again = repair(path)
    assert (again.records, again.torn) == (len(survived), False), "a repaired file is whole"
    more = [record(1000), record(1001)]
    go_on(path, more)
    with open_trace(path) as reader:
        assert list(reader) == survived + more
        assert reader.warnings == []
        assert reader.meta == META


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_truncation_of_a_small_file_is_repaired(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    written = write(path, [(0, True), (40, True), (3, True)])
    complete = path.read_bytes()
    kept = set()
    for cut in range(len(complete) + 1):
        path.write_bytes(complete[:cut])
        survived = readable(path)
        repaired = repair(path)
        assert repaired.records == len(survived), cut
        kept.add(repaired.records)
        assert repaired.meta == (META if path.stat().st_size else None)
        if repaired.meta is not None:
            assert load_trace(path) == (META, written[: repaired.records])
    assert kept == {0, 1, 2, 3}


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_only_the_torn_frame_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr("tracefile.storage.compression.FRAME_BYTES", 1000)
    path = tmp_path / f"a.jsonl{suffix}"
    written = write(path, [(400, True)] * 20)
    complete = path.read_bytes()
    path.write_bytes(complete[:-30])
    repaired = repair(path)
    assert 17 <= repaired.records < 20
    assert load_trace(path)[1] == written[: repaired.records]
    assert path.read_bytes().startswith(complete[: round(0.8 * len(complete))])


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5000))
def test_zeros_after_a_power_cut_are_dropped(tmp_path_factory: pytest.TempPathFactory, suffix: str, zeros: int) -> None:
    path = tmp_path_factory.mktemp("zeros") / f"a.jsonl{suffix}"
    write(path, [(10, True)] * 3)
    complete = path.read_bytes()
    path.write_bytes(complete[:-20] + bytes(zeros))
    before = len(readable_lines(path))
    assert repair(path).records == before
    assert len(load_trace(path)[1]) == before


def readable_lines(path: Path) -> list[bytes]:
    """The complete record lines that any tool would get out of the file before it gives up."""
    data = path.read_bytes()
    inflaters: dict[str, Any] = {
        ".gz": lambda: zlib.decompressobj(wbits=31),
        ".zst": zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj,
    }
    if path.suffix in inflaters:
        inflater, content = inflaters[path.suffix](), b""
        with contextlib.suppress(zlib.error, zstandard.ZstdError):
            for byte in data:
                content += inflater.decompress(bytes([byte]))
        data = content
    return [line for line in data.split(b"\n")[1:] if is_json(line)]


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_several_headers_and_streams_in_one_file_are_no_damage(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = tmp_path / f"a.jsonl{suffix}"
        write(path, [(5, True)] * 2)
        path.write_bytes(path.read_bytes() * 2)
        repaired = repair(path)
        assert (repaired.records, repaired.torn) == (4, False)


@pytest.mark.parametrize(
    "content", [b"precious\n", b"precious", b'{"a": 1}\n{"b": 2}\n', b'{"meta": {"schema": "x/1"}}\n']
)
def test_other_files_are_rejected_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"notes\.jsonl"):
        repair(path)
    assert path.read_bytes() == content
