"""Numbers pushed to an admin process that is there, slow, gone, or there again: the sender never waits."""

import socket
from pathlib import Path

import msgspec
import pytest

from measure.histogram import (
    GAP_S,
    OVERHEAD_S,
    WAIT_S,
    HistogramCounts,
    add_counts,
    add_value,
    add_values,
    cumulative,
    empty_counts,
)
from tap.ipc.exchange import Progress, encode_frame
from tap.ipc.feed import BACKLOG_BYTES, FeedSender, RecorderStats, WorkerStats
from tap.recorder.meter import MAX_KINDS, RecordMeter
from tracefile.records.schema import Record, RequestId
from wire.process import split_frames


class Listener:
    """The admin process's end, read when the test says so."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        self.server.settimeout(30)
        self.buffer = bytearray()

    def accept(self) -> None:
        self.connection, _ = self.server.accept()
        self.connection.setblocking(False)

    def frames(self) -> list[bytes]:
        """Whole frames that came since the last call."""
        try:
            while data := self.connection.recv(1 << 20):
                self.buffer += data
        except BlockingIOError:
            pass
        return split_frames(self.buffer)

    def close(self) -> None:
        self.connection.close()
        self.server.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.sock"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are tried again at once."""
    monkeypatch.setattr("tap.ipc.feed.RECONNECT_S", 0.0)


def frame(size: int = 4) -> bytes:
    return size.to_bytes(4, "little") + b"x" * size


def test_frames_come_whole_and_in_order(path: Path) -> None:
    listener, sender = Listener(path), FeedSender(str(path))
    assert sender.offer(frame(3))
    listener.accept()
    assert sender.offer(frame(5))
    assert [len(one) for one in listener.frames()] == [3, 5]
    sender.close()
    listener.close()


def test_without_a_listener_frames_are_given_up(path: Path, impatient: None) -> None:
    sender = FeedSender(str(path))
    assert not sender.offer(frame())
    listener = Listener(path)
    assert sender.offer(frame())
    sender.close()
    listener.accept()
    listener.close()


def test_a_listener_that_does_not_read_costs_bounded_memory_and_no_wait(path: Path) -> None:
    listener, sender = Listener(path), FeedSender(str(path))
    size = 100_000
    taken = sum(sender.offer(frame(size)) for _ in range(2 * BACKLOG_BYTES // size))
    assert taken < 2 * BACKLOG_BYTES // size
    listener.accept()
    received = listener.frames()
    while len(received) < taken:  # what was kept goes out as it is read, every frame whole
        sender.flush()
        received += listener.frames()
    assert {len(one) for one in received} == {size}
    assert sender.offer(frame())
    sender.close()
    listener.close()


def test_a_new_listener_gets_whole_frames(path: Path, impatient: None) -> None:
    listener, sender = Listener(path), FeedSender(str(path))
    sender.offer(frame(4_000_000))  # more than a socket takes: a part of it is gone with the first listener
    listener.accept()
    listener.close()
    path.unlink()
    assert not sender.offer(frame(6))
    listener = Listener(path)
    assert sender.offer(frame(7))
    listener.accept()
    assert [len(one) for one in listener.frames()] == [7]
    sender.close()
    listener.close()


def record(**fields: object) -> Record:
    return msgspec.structs.replace(Record(request_id=RequestId("r")), **fields)


def test_the_meter_counts_exactly(path: Path) -> None:
    listener, meter = Listener(path), RecordMeter(str(path), pid=7)
    served = {"endpoint": "/v1/completions", "http_status": 200, "upstream": "http://e:1", "session_id": "s"}
    meter.observe(record(ttft_ms=30.0, itl_ms=[4.0, 6.0], prompt_tokens=40, output_tokens=3, **served), 25_000)
    meter.observe(record(status="error", ttft_ms=None, **(served | {"http_status": 429})), None)
    meter.observe(record(ttft_ms=30.1, prompt_tokens=20, cached_tokens=16, **served), None)
    meter.push_if_due(100.0, lambda: Progress(recorded=3), writing=True)
    listener.accept()
    frames = listener.frames()
    stats = msgspec.msgpack.decode(frames[0], type=RecorderStats)
    assert [(one.http_status, one.count) for one in stats.requests] == [(200, 2), (429, 1)]
    # A bucket holds what is no larger than its bound: 30 ms is in the one up to 0.03 s, 30.1 in the next.
    by_bound = dict(zip(WAIT_S, stats.ttft.counts, strict=False))
    assert (by_bound[0.03], by_bound[0.04], stats.ttft.count) == (1, 1, 2)
    assert stats.ttft.total == pytest.approx(0.0601)
    assert stats.gaps.count == 2
    assert stats.gaps.total == pytest.approx(0.010)
    assert dict(zip(OVERHEAD_S, stats.request_head.counts, strict=False))[3e-5] == 1
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (60, 16, 3)
    assert (stats.progress.recorded, stats.writing) == (3, True)
    meter.close(Progress())
    listener.close()


def test_endless_kinds_of_requests_do_not_become_endless_memory(path: Path) -> None:
    meter = RecordMeter(str(path), pid=7)
    for number in range(MAX_KINDS + 50):
        meter.observe(record(endpoint=f"/v1/{number}"), None)
    requests = meter.stats(Progress(), writing=True).requests
    assert len(requests) == MAX_KINDS + 1
    assert next(one.count for one in requests if one.endpoint == "other") == 50


def test_many_values_are_counted_as_one_by_one() -> None:
    values = [bound * factor for bound in GAP_S for factor in (0.5, 1.0, 1.01)] + [1e9]
    one_by_one, at_once = empty_counts(GAP_S), empty_counts(GAP_S)
    for value in values:
        add_value(one_by_one, GAP_S, value)
    add_values(at_once, GAP_S, values)
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(one_by_one.total)
    add_counts(at_once, HistogramCounts([]))  # of a process that counts nothing of the kind
    add_counts(at_once, one_by_one)
    assert at_once.count == 2 * len(values)
    assert cumulative(GAP_S, at_once)[-1] == ("+Inf", 2.0 * len(values))


def test_a_workers_numbers_survive_the_wire() -> None:
    stats = WorkerStats(worker=1, pid=2, in_flight=3)
    assert msgspec.msgpack.decode(encode_frame(stats)[4:], type=WorkerStats) == stats
