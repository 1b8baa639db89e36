"""Reading and writing: what goes in comes out, from any compression, and whatever cut the writer short."""

import gzip
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.decoding import KvtapeDecoder
from tracefile.records.encoding import encode_record
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Engine, HashInfo, Meta, Record, RequestId, Workload

SUFFIXES = ["", ".gz", ".zst"]
META = Meta(source="tap", model="m", block_size=16, hash=HashInfo(algorithm="xxh3_64", key_id="ab"))


def records(count: int) -> list[Record]:
    return [
        Record(
            request_id=RequestId(f"r{i}"),
            arrival_ms=i * 1.5,
            prompt_tokens=32,
            block_hashes=[BlockHash(2**64 - 1), BlockHash(i)],
            extra={"note": [i, None]} if i % 2 else {},
        )
        for i in range(count)
    ]


def write(path: Path, given_records: list[Record], meta: Meta = META) -> Path:
    with TraceWriter(path, meta) as writer:
        for record in given_records:
            writer.write(record)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_written_records_are_read(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", records(9))
    assert load_trace(path) == (META, records(9))


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_concatenated_streams_are_one_trace(tmp_path: Path, suffix: str, compress) -> None:  # type: ignore[no-untyped-def]
    lines = write(tmp_path / "plain.jsonl", records(4)).read_bytes().splitlines(keepends=True)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b"".join(lines[:2])) + compress(b"".join(lines[2:])))
    assert load_trace(path)[1] == records(4)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
known = {field.name for field in msgspec.structs.fields(Record)} - {"extra"}
extras = st.dictionaries(st.text().filter(lambda key: key not in known), json_values, max_size=4)
times = st.none() | st.floats(0, 1e9)
hashes = st.none() | st.lists(st.integers(0, 2**64 - 1).map(BlockHash), max_size=4)
any_record = st.builds(
    Record,
    request_id=st.text(min_size=1).map(RequestId),
    arrival_ms=times,
    ttft_ms=times,
    itl_ms=st.lists(st.floats(0, 1e6), max_size=4),
    itl_tokens=st.lists(st.integers(1, 9), max_size=4),
    status=st.sampled_from(["ok", "error", "client_abort", "upstream_abort", "timeout"]),
    cached_tokens=st.none() | st.integers(0, 9),
    stream=st.none() | st.booleans(),
    block_hashes=hashes,
    output_block_hashes=hashes,
    hash_source=st.sampled_from([None, "engine", "bytes"]),
    extra=extras,
)


@settings(deadline=None)
@given(any_record)
def test_a_record_line_reads_back_as_it_was(record: Record) -> None:
    line = encode_record(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert KvtapeDecoder(META).decode(line, "t:1") == record


@settings(deadline=None, max_examples=50)
@given(extras, extras)
def test_unknown_fields_of_the_header_survive_at_every_level(tmp_path_factory, outer, inner) -> None:  # type: ignore[no-untyped-def]
    known = {field.name for struct in (Meta, Engine, Workload) for field in msgspec.structs.fields(struct)}
    outer, inner = ({key: value for key, value in extra.items() if key not in known} for extra in (outer, inner))
    meta = Meta(engine=Engine(name="vllm", extra=inner), workload=Workload(seed=1, extra=inner), extra=outer)
    path = tmp_path_factory.mktemp("meta") / "a.jsonl"
    write(path, [], meta)
    assert load_trace(path)[0] == meta
    assert json.loads(path.read_text())["meta"].keys() >= outer.keys()


def test_extra_cannot_contain_a_known_field() -> None:
    with pytest.raises(InputError, match=r"extra\.ttft_ms"):
        encode_record(Record(request_id=RequestId("a"), extra={"ttft_ms": 1.0}))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_truncated_at_any_byte_gives_the_records_before_and_a_warning(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    with TraceWriter(path, META) as writer:
        for record in records(4):
            writer.write(record)
            writer.flush()
    complete = path.read_bytes()
    torn = tmp_path / "torn"
    seen = set()
    for cut in range(len(complete)):
        torn.write_bytes(complete[:cut])
        try:
            reader = open_trace(torn)
        except InputError as error:
            assert str(torn) in str(error)  # noqa: PT017 - not even the header survived
            continue
        with reader:
            read = list(reader)
            assert read == records(4)[: len(read)]
            seen.add(len(read))
            at_line_end = not suffix and (complete[:cut].endswith(b"\n") or complete[cut : cut + 1] == b"\n")
            assert len(reader.warnings) == (0 if at_line_end else 1), (cut, reader.warnings)
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flushed_record_is_on_disk_while_the_writer_lives(tmp_path: Path, suffix: str) -> None:
    writer = TraceWriter(tmp_path / f"a.jsonl{suffix}", META)
    with open_trace(writer.path) as reader:
        assert reader.meta == META  # the header is there at once
    writer.write(records(1)[0])
    writer.flush()
    with open_trace(writer.path) as reader:
        assert list(reader) == records(1)
    writer.close()
    writer.close()


KILLED_WRITER = """
import sys, time
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Meta, Record
writer = TraceWriter(sys.argv[1], Meta(source="tap"))
for i in range(100):
    writer.write(Record(request_id=f"r{i}", extra={"filler": "x" * 100}))
print("written", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_writer_loses_at_most_a_second(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    with subprocess.Popen([sys.executable, "-c", KILLED_WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        count = 0
        while count < 100:  # within a second or so: nobody calls flush
            time.sleep(0.05)
            with open_trace(path) as reader:
                count = sum(1 for _ in reader)
        writer.kill()
    with open_trace(path) as reader:
        assert [record.request_id for record in reader] == [f"r{i}" for i in range(100)]
        assert len(reader.warnings) == (1 if suffix else 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"request_id": "a", "ttft_ms": "soon"}', "t.jsonl:3: ttft_ms: Expected `float | null`, got `str`"),
        (b'{"ttft_ms": 1}', "t.jsonl:3: request_id: missing"),
        (b'{"request_id": "a", "ttft_ms": NaN}', "t.jsonl:3: NaN or Infinity"),
    ],
)
def test_malformed_line_error_has_line_and_field(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"meta": {"schema": "kvtape/1"}}\n{"request_id": "ok"}\n' + line + b'\n{"request_id": "z"}\n')
    with open_trace(path) as reader:
        assert next(reader).request_id == "ok"
        with pytest.raises(InputError) as raised:
            next(reader)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: no lines"),
        (b'{"a": 1}\n', ":1: neither a trace's header"),
        (gzip.compress(b"x" * 100)[:-20] + b"\0" * 20, "damaged gzip data"),
    ],
)
def test_other_files_are_rejected_when_opened(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        open_trace(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)


def test_writer_overwrites_only_with_the_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records(2))
    with pytest.raises(InputError, match="already has"):
        TraceWriter(path, META)
    assert load_trace(path)[1] == records(2)
    with TraceWriter(path, META, overwrite=True) as writer:
        writer.write(records(1)[0])
    assert load_trace(path)[1] == records(1)


def test_full_disk_loses_only_rejected_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "a.jsonl", META)
    used = records(4)
    real_write = os.write

    def full_after_a_few_bytes(fd: int, data: bytes) -> int:
        if len(data) > 5:
            return real_write(fd, bytes(data[:5]))  # a short write, then no space: the line is torn for now
        raise OSError(28, "No space left on device")

    writer.write(used[0])
    monkeypatch.setattr("os.write", full_after_a_few_bytes)
    with pytest.raises(InputError, match="No space left"):
        writer.flush()
    with pytest.raises(InputError, match="No space left"):
        writer.write(used[1])
    monkeypatch.setattr("os.write", real_write)
    writer.write(used[2])
    writer.close()
    assert writer.count == 2
    assert load_trace(writer.path)[1] == [used[0], used[2]]


def test_a_trace_larger_than_the_bound_streams_through(tmp_path: Path) -> None:
    chain = [BlockHash(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(500)]
    path = tmp_path / "big.jsonl.zst"
    count = 3500
    with TraceWriter(path, META) as writer:
        for i in range(count):
            writer.write(Record(request_id=RequestId(f"r{i}"), block_hashes=chain))
    plain_bytes = count * len(encode_record(Record(request_id=RequestId("r0"), block_hashes=chain)))
    assert path.stat().st_size < plain_bytes / 50  # repeated prefixes compress away
    tracemalloc.start()
    with open_trace(path) as reader:
        assert sum(1 for _ in reader) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < plain_bytes / 2, (peak, plain_bytes)


def test_digest_depends_on_records_only(tmp_path: Path) -> None:
    digests = {trace_digest(write(tmp_path / f"a.jsonl{suffix}", records(5))) for suffix in SUFFIXES}
    digests.add(trace_digest(write(tmp_path / "b.jsonl", records(5), Meta(model="another header"))))
    assert len(digests) == 1
    assert trace_digest(write(tmp_path / "c.jsonl", records(4))) not in digests
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes((tmp_path / "b.jsonl").read_bytes() + b'{"request_id": "to')
    assert trace_digest(torn) in digests
