"""Uploads: every closed segment arrives, byte for byte, however often that takes; what did not is not said to have."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tap.recorder.segments import SegmentedTrace
from tap.recorder.upload import Uploader
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId
from tracefile.storage.segments import segments_there


@pytest.fixture
def segments(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "here"
    folder.mkdir()
    trace = SegmentedTrace(folder / "captured.jsonl.zst", Meta(source="tap"), rotate_bytes=1)
    for number in range(3):
        trace.write(Record(request_id=RequestId(f"r{number}")))
        trace.flush()
        trace.rotate_if_due()
    trace.close()
    return segments_there(trace.path)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tap.recorder.upload.FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("tap.recorder.upload.LONGEST_WAIT_S", 0.002)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 server on a real socket; nothing of this machine's own credentials is used."""
    from moto.server import ThreadedMotoServer  # half a second that no other worker needs

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    yield files
    server.stop()


def send(url: str, segments: list[Path]) -> tuple[Uploader, list[str]]:
    uploader = Uploader(url)
    for path in [*segments, *segments]:
        uploader.offer(path)
    uploader.flush(timeout_s=30)
    return uploader, [sent.where for sent in uploader.uploaded()]


def test_segments_go_to_s3_over_http(segments: list[Path], s3: Any) -> None:
    uploader, sent = send("s3://bucket/tap/one", segments)
    assert (uploader.failed, sent) == (0, [f"s3://bucket/tap/one/{path.name}" for path in segments])
    for path in segments:
        assert s3.cat_file(f"bucket/tap/one/{path.name}") == path.read_bytes()
    here = load_trace(segments[0].parent)
    assert load_trace("s3://bucket/tap/one") == here
    assert load_trace("s3://bucket/tap/one/captured.jsonl.zst") == here, "by the whole's name"
    assert load_trace(f"s3://bucket/tap/one/{segments[1].name}")[1] == here[1][1:2]
    assert trace_digest("s3://bucket/tap/one") == trace_digest(segments[0].parent)
    for nothing in ("s3://bucket/tap/two", "s3://nowhere/tap", "s3://bucket"):
        with pytest.raises(InputError, match=f"{nothing}.*; expected"):
            load_trace(nothing)


def test_failed_upload_is_retried(
    segments: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = fsspec.filesystem("memory")
    real, tries = memory.put_file, []

    def put_file(source: str, target: str) -> None:
        tries.append(target)
        if len(tries) in (1, 2):
            raise PermissionError("the secret is KANARIE")
        if len(tries) == 3:
            memory.pipe_file(target, b"cut sho")
            return
        real(source, target)

    monkeypatch.setattr(type(memory), "put_file", lambda _, source, target: put_file(source, target))
    uploader, sent = send("memory://flaky", segments)
    assert (len(sent), uploader.failed, len(tries)) == (3, 3, 6)
    for path, where in zip(segments, sent, strict=True):
        with fsspec.open(where, "rb") as copy:
            assert copy.read() == path.read_bytes(), "a copy cut short is not taken for one"
    printed = capsys.readouterr().err
    assert "upload failed (PermissionError)" in printed
    assert f"{segments[0].name}: uploaded" in printed
    assert "KANARIE" not in printed


def test_unfinished_uploads_stay_local(segments: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")

    def put_file(*_: object) -> None:
        raise OSError("never")

    monkeypatch.setattr(type(memory), "put_file", put_file)
    uploader = Uploader("memory://down")
    uploader.offer(segments[0])
    while not uploader.failed:
        time.sleep(0.001)
    uploader.flush(timeout_s=0.01)
    assert uploader.uploaded() == []
    assert segments[0].exists()


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("nosuch://user:KANARIE@host/x?token=KANARIE", "--upload nosuch://host/x: "),
        ("file:///proc/never/there", "--upload file:///proc/never/there: "),
    ],
)
def test_invalid_upload_url_is_refused_without_secrets(url: str, printed: str) -> None:
    with pytest.raises(InputError) as refused:
        Uploader(url)
    assert printed in str(refused.value)
    assert "KANARIE" not in str(refused.value)
