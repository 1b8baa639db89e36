"""Traces at a URL: what is read is what a local folder of the same files gives, and errors keep credentials."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile.__main__ import main as tracefile
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId
from tracefile.storage.remote import given_path

URL = "memory://traces/host-1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three segments and their manifest."""
    (tmp_path / "here").mkdir()
    trace = SegmentedTrace(tmp_path / "here" / "tap.jsonl.zst", Meta(source="tap"), rotate_bytes=1)
    for number in range(3):
        trace.write(Record(request_id=RequestId(f"r{number}"), arrival_ms=float(number)))
        trace.flush()
        trace.rotate_if_due()
    trace.close()
    return trace.path.parent


@pytest.fixture
def bucket(folder: Path) -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    for file in folder.iterdir():
        files.pipe_file(f"/traces/host-1/{file.name}", file.read_bytes())
    yield files
    files.store.clear()


@pytest.mark.parametrize("given", [URL, f"{URL}/", f"{URL}/tap.segments.json", f"{URL}/tap.jsonl.zst", Path(URL)])
def test_a_trace_is_read_by_its_folder_its_manifest_or_its_name(bucket: Any, folder: Path, given: Any) -> None:
    assert load_trace(given) == load_trace(folder)
    assert trace_digest(given) == trace_digest(folder)


def test_missing_segment_gives_a_warning(bucket: Any, folder: Path) -> None:
    bucket.rm("/traces/host-1/tap-000002.jsonl.zst")
    with open_trace(URL) as reader:
        assert [record.request_id for record in reader] == ["r0", "r2"]
        assert reader.warnings == [f"{URL}: read without 1 of its segments (tap-000002.jsonl.zst …): missing"]


def test_two_traces_in_a_folder_are_separated_by_name(bucket: Any, folder: Path) -> None:
    bucket.pipe_file("/traces/host-1/tap-b-000001.jsonl.zst", b"another's")
    with pytest.raises(InputError, match="segments of tap and tap-b; expected"):
        load_trace(URL)
    assert load_trace(f"{URL}/tap.segments.json") == load_trace(folder)


def test_a_file_url_is_a_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_trace(f"file://{folder}") == load_trace(folder)
    assert tracefile(["check", f"file://{folder}"]) == 0
    assert given_path(Path("file:///a%20b/c")) == "/a b/c"
    assert given_path(Path("s3://b/p")) == "s3://b/p"
    assert (given_path("t.jsonl"), given_path("a:b/c"), given_path("-")) == ("t.jsonl", "a:b/c", "/dev/stdin")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "memory://nothing/there",
            "memory://nothing/there: all its segments are missing; expected a trace, or a folder",
        ),
        ("nosuch://user:CANARY@host/x?token=CANARY", "nosuch://host/x: ValueError; expected a trace"),
    ],
)
def test_url_errors_have_no_credentials(url: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load_trace(url)
    assert message in str(refused.value)
    assert "CANARY" not in str(refused.value)
