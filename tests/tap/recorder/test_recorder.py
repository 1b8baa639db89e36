"""The recorder: what it counts is in its files, through kills and full disks; sessions, clock and uploads go on."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tap.ipc.messages import CapturedExchange, EngineChanged, Progress, Ready, RecorderSetup, Refused, encode_frame
from tap.recorder.recorder import Recorder
from tests.tap.conftest import settings_of
from tests.warmstart import WarmPopen
from tracefile.files.reading import load_trace, open_trace
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Engine, HashInfo, Meta, Record
from tracefile.storage.segments import manifest_path, read_manifest, segments_there
from wire.process import split_frames

ROOT = Path(__file__).parent.parent.parent.parent
KEY = HashKey(bytes(range(32)))
EPOCH_UNIX_NS = 1_000_000_000_000
SECOND = 1_000_000_000

_replies = msgspec.msgpack.Decoder(Ready | Refused | Progress)


def setup(trace: Path, *, epoch_ns: int = 0, epoch_unix_ns: int = EPOCH_UNIX_NS, **changed: Any) -> RecorderSetup:
    meta = Meta(
        source="tap", block_size=4, hash=HashInfo(algorithm="xxh3_64", key_id=KEY.key_id), epoch_unix_ns=epoch_unix_ns
    )
    carry, path = changed.pop("carry", Progress()), changed.pop("socket", "")
    return RecorderSetup(
        settings=settings_of(trace=str(trace), **changed),
        socket=path,
        meta=meta,
        key_secret=KEY.secret,
        dialect="vllm",
        engine_url="http://127.0.0.1:9",
        epoch_ns=epoch_ns,
        carry=carry,
    )


def exchange(ids: list[int], at_s: float, *, output: list[int] | None = None, **headers: str) -> CapturedExchange:
    """A request for one token, with a response after 0.5 s."""
    choice = {"index": 0, "text": "t", "finish_reason": "length", "token_ids": output}
    answer = {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(output or [0])}}
    arrival_ns = round(at_s * SECOND)
    end_ns = arrival_ns + SECOND // 2
    return CapturedExchange(
        endpoint="/v1/completions",
        arrival_ns=arrival_ns,
        end_ns=end_ns,
        concurrency=1,
        request_headers={name.replace("_", "-"): value for name, value in headers.items()},
        request_body=[json.dumps({"model": "m", "prompt": ids, "max_tokens": 1}).encode()],
        http_status=200,
        response_headers={"content-type": "application/json"},
        response_reads=[(end_ns, json.dumps(answer).encode())],
        response_complete=True,
        last_reads=[],
        outcome="ok",
        error_kind=None,
    )


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def records(trace: Path) -> list[Record]:
    return load_trace(trace)[1]


@pytest.fixture(params=[None, 300], ids=["one file", "segments"])
def rotate(request: Any) -> int | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "captured.jsonl.zst"


def test_resumed_trace_keeps_epoch_sessions_and_ids(trace: Path, rotate: int | None) -> None:
    first = Recorder(setup(trace, rotate_bytes=rotate))
    first.record(exchange(tokens(8), 1, output=tokens(5, 100), x_request_id="mine"))
    first.record(exchange(tokens(8, 50), 2, x_session_id="named"))
    assert first.close().recorded == 2
    # The machine was started anew 100 s after the first run's t = 0: another monotonic clock, a later wall clock.
    again = Recorder(
        setup(trace, rotate_bytes=rotate, resume=True, epoch_ns=7, epoch_unix_ns=EPOCH_UNIX_NS + 100 * SECOND)
    )
    begun = again.progress()
    assert (begun.earlier_records, begun.recorded) == (2, 0)
    continued = [*tokens(8), *tokens(5, 100), *tokens(4, 200)]
    again.record(exchange(continued, 3, x_request_id="mine"))
    again.record(exchange(tokens(8, 50), 4, x_session_id="named"))
    ended = again.close()
    assert (ended.earlier_records, ended.recorded, ended.received) == (2, 2, 2)
    a, b, c, d = records(trace)
    assert (c.session_id, c.turn, c.parent_id) == (a.session_id, 2, a.request_id)
    assert (d.session_id, d.turn, d.parent_id) == (b.session_id, 2, b.request_id)
    assert c.arrival_ms == pytest.approx(103_000), "on the old clock"
    assert c.think_ms == pytest.approx(103_000 - 1_500)
    assert len({record.request_id for record in (a, b, c, d)}) == 4, "an id used before is still known"


def test_arrivals_never_decrease_after_a_clock_step(trace: Path) -> None:
    first = Recorder(setup(trace))
    first.record(exchange(tokens(8), 50))
    first.close()
    again = Recorder(setup(trace, resume=True, epoch_unix_ns=EPOCH_UNIX_NS - 3600 * SECOND))
    again.record(exchange(tokens(8), 1))
    again.close()
    assert [record.arrival_ms for record in records(trace)] == [50_000, 51_500], "50.5 s, where it ended, and 1 s more"


def die(recorder: Recorder) -> None:
    """What becomes of a recorder's open file when it is killed."""
    assert recorder._trace._segment is not None
    recorder._trace._segment.file.abandon()


def test_restarted_recorder_counts_records_in_files(trace: Path, rotate: int | None) -> None:
    earlier = Recorder(setup(trace, rotate_bytes=rotate))
    earlier.record(exchange(tokens(8), 0))
    earlier.close()
    first = Recorder(setup(trace, rotate_bytes=rotate, resume=True))
    for at in range(5):
        first.record(exchange(tokens(8), at + 1))
    assert first.tick()
    reported = first.progress()
    assert (reported.recorded, reported.hashed) == (5, 5)
    first.record(exchange(tokens(8), 7))
    first.record(msgspec.structs.replace(exchange([], 8), request_body=[b"no json"]))
    first.tick()  # it died before this was heard
    die(first)
    again = Recorder(setup(trace, rotate_bytes=rotate, resume=True, carry=reported))
    begun = again.progress()
    assert (begun.earlier_records, begun.recorded, begun.hashed, begun.received) == (1, 7, 6, 5)
    assert begun.unhashed == {"recorder_restarted": 1}
    again.record(exchange(tokens(8), 9))
    ended = again.close()
    assert (ended.earlier_records, ended.recorded, ended.hashed, ended.received) == (1, 8, 7, 6)
    assert len(records(trace)) == 9
    arrivals = [record.arrival_ms for record in records(trace)]
    assert arrivals == [0, 1000, 2000, 3000, 4000, 5000, 7000, 8000, 9000], "one tap, one clock"


def test_records_during_a_full_disk_are_dropped_and_counted(
    trace: Path, rotate: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(setup(trace, rotate_bytes=rotate))
    real_write, full = os.write, [False]

    def write(fd: int, data: Any) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr("os.write", write)
    for at in range(30):
        full[0] = 10 <= at < 20
        recorder.record(exchange(tokens(8, at), at))
        assert recorder.tick()
        assert recorder.progress().recorded <= 10 or not full[0]
    ended = recorder.close()
    assert ended.recorded == len(records(trace)) == 30 - ended.dropped["trace_unwritable"]
    # One record was accepted before the full disk was detected; one arrived before free space was detected.
    assert ended.dropped["trace_unwritable"] == 10


def test_engine_change_is_in_the_header_before_its_records(trace: Path, rotate: int | None) -> None:
    recorder = Recorder(setup(trace, rotate_bytes=rotate))
    recorder.record(exchange(tokens(8), 1))
    engine = Engine(name="vllm", version="2")
    recorder.change_engine(engine)
    recorder.tick()
    recorder.record(exchange(tokens(8), 2))
    assert recorder.close().recorded == 2
    with open_trace(trace) as reader:
        assert [reader.latest_meta.engine for _ in reader] == [None, engine]


def test_closed_segments_are_uploaded_in_this_or_the_next_run(trace: Path, tmp_path: Path) -> None:
    first = Recorder(setup(trace, rotate_bytes=1))
    for at in range(3):
        first.record(exchange(tokens(8), at))
        first.tick()
    assert first.close().segments == 3
    there = tmp_path / "there"
    again = Recorder(setup(trace, rotate_bytes=1, resume=True, upload=f"file://{there}"))
    again.record(exchange(tokens(8), 9))
    again.tick()
    again.close()
    ended = again.finish_uploads()
    assert (ended.segments, ended.uploaded, ended.upload_failed) == (4, 4, 0)
    assert load_trace(there) == load_trace(trace)
    for segment in read_manifest(manifest_path(trace)).segments:
        assert segment.uploaded == f"file://{there}/{segment.name}"
    assert (there / manifest_path(trace).name).read_bytes() == manifest_path(trace).read_bytes()
    third = Recorder(setup(trace, rotate_bytes=1, resume=True, upload=f"file://{tmp_path / 'elsewhere'}"))
    third.close()
    assert third.finish_uploads().uploaded == 4
    assert not list((tmp_path / "elsewhere").iterdir()), "what is uploaded is not uploaded again"


class RecorderProcess:
    """A recorder started as by the supervisor, with the socket of a worker."""

    def __init__(self, given: RecorderSetup) -> None:
        self.control, theirs = socket.socketpair()
        self._buffer = bytearray()
        self._heard: list[Any] = []
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with theirs:
            command = [sys.executable, "-m", "tap.recorder.recorder", str(theirs.fileno())]
            self.process = WarmPopen(command, pass_fds=[theirs.fileno()], env=environment)
        self.control.sendall(encode_frame(given))
        self.begun = [self.hear(), self.hear()]
        self.worker = socket.socket(socket.AF_UNIX)
        self.worker.connect(given.socket)

    def hear(self) -> Any:
        """Its next message; null once it has ended."""
        while not self._heard:
            data = self.control.recv(1 << 16)
            if not data:
                return None
            self._buffer += data
            self._heard += [_replies.decode(payload) for payload in split_frames(self._buffer)]
        return self._heard.pop(0)

    def hear_of(self, recorded: int) -> Progress:
        """Its messages until it counts so many."""
        while (progress := self.hear()).recorded < recorded:
            pass
        return progress  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.worker.close()
        self.control.close()

    def end(self) -> Progress:
        """Close both sockets; return the recorder's last message."""
        self.worker.close()
        self.control.shutdown(socket.SHUT_WR)
        last = Progress()
        while (progress := self.hear()) is not None:
            last = progress
        assert self.process.wait() == 0
        self.control.close()
        return last


@pytest.fixture
def killed() -> Iterator[list[RecorderProcess]]:
    started: list[RecorderProcess] = []
    yield started
    for process in started:
        process.kill()


def test_counts_equal_files_after_repeated_kills(
    trace: Path, tmp_path: Path, rotate: int | None, killed: list[RecorderProcess]
) -> None:
    given = setup(trace, rotate_bytes=rotate, socket=str(tmp_path / "s"))
    process = RecorderProcess(given)
    killed.append(process)
    assert [type(message) for message in process.begun] == [Ready, Progress]
    sent, heard = 0, process.begun[1]
    for _ in range(3):
        for _ in range(40):
            process.worker.sendall(encode_frame(exchange(tokens(8), sent, x_session_id="s")))
            sent += 1
        heard = process.hear_of(heard.recorded + 10)
        process.kill()
        cached_keys = len(records(trace)) if rotate is None else len(load_trace(manifest_path(trace))[1])
        assert cached_keys >= heard.recorded
        resumed = msgspec.structs.replace(given.settings, resume=True)
        process = RecorderProcess(msgspec.structs.replace(given, settings=resumed, carry=heard))
        killed.append(process)
        heard = process.begun[1]
        assert heard.recorded == cached_keys
    process.control.sendall(encode_frame(EngineChanged(Engine(name="another"))))
    process.worker.sendall(encode_frame(exchange(tokens(8), sent, x_session_id="s")))
    ended = process.end()
    assert ended.recorded == heard.recorded + 1 == len(records(trace))
    turns = [record.turn for record in records(trace)]
    assert turns == list(range(1, len(turns) + 1)), "one session, from kill to kill"
    if rotate is not None:
        assert not [path for path in segments_there(trace) if path.suffix == ".part"]
