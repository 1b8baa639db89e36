"""A worker's link to a recorder that is slow, away, or dies half-way: what it got, what it did not, all counted."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tap.ipc.messages import CapturedExchange
from tap.ipc.sharedmemory import IN_FLIGHT, OFFERED, QUEUE_FULL, RECORDER_OFF, SENT, WorkerCounts
from tap.proxy.capture_buffer import CaptureBudget, CaptureBuffer
from tap.proxy.recorderlink import RecorderLink
from wire.process import split_frames

_decoder = msgspec.msgpack.Decoder(CapturedExchange)


class Recorder:
    """Listening socket that is read on demand."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self.connection: socket.socket | None = None

    async def accept(self) -> None:
        async with asyncio.timeout(30):
            self.connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)

    async def read(self, size: int) -> bytes:
        assert self.connection is not None
        async with asyncio.timeout(30):
            return await asyncio.get_running_loop().sock_recv(self.connection, size)

    async def read_all(self) -> list[CapturedExchange]:
        """Everything up to the end, as exchanges."""
        buffer, exchanges = bytearray(), []
        while data := await self.read(1 << 20):
            buffer += data
            exchanges += [_decoder.decode(payload) for payload in split_frames(buffer)]
        assert not buffer, "half a frame"
        return exchanges

    def close(self) -> None:
        self._listener.close()
        if self.connection is not None:
            self.connection.close()


class Lab:
    """A link, its counts, and requests to hand over."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "recorder.sock"
        self.counts = WorkerCounts(str(folder), 1)
        self.cells = self.counts.row(0)
        self.budget = CaptureBudget(1 << 30)

    def link(self, queue_bytes: int = 1 << 30) -> RecorderLink:
        self.budget.limit_bytes = queue_bytes
        return RecorderLink(str(self.socket), self.budget, self.counts)

    def hand_over(self, link: RecorderLink, body: bytes) -> None:
        side = CaptureBuffer(
            self.budget,
            1 << 30,
            endpoint="/v1/completions",
            arrival_ns=0,
            concurrency=link.begin(),
            headers=[],
            names=[],
        )
        side.request_body(body)
        link.submit(side, 1, "ok", None)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket's path
        yield Lab(Path(folder))


def bodies(exchanges: list[CapturedExchange]) -> list[bytes]:
    return [b"".join(exchange.request_body or []) for exchange in exchanges]


def test_exchanges_arrive_in_order(lab: Lab) -> None:
    async def scenario() -> None:
        recorder = Recorder(lab.socket)
        link = lab.link()
        await recorder.accept()
        sent = [b"%d" % number * (number * 1000) for number in range(100)]
        for body in sent:
            lab.hand_over(link, body)
        reading = asyncio.create_task(recorder.read_all())
        await link.finish(30)
        assert bodies(await reading) == sent
        recorder.close()

    asyncio.run(scenario())
    assert list(lab.cells[: IN_FLIGHT + 1]) == [100, 100, 0, 0, 0]
    assert lab.budget.used_bytes == 0


def test_slow_recorder_drops_beyond_the_budget(lab: Lab) -> None:
    async def scenario() -> int:
        recorder = Recorder(lab.socket)
        link = lab.link(queue_bytes=2_000_000)
        await recorder.accept()
        for number in range(100):
            lab.hand_over(link, b"x" * 100_000)
            assert lab.budget.used_bytes < 2_200_000
            if number % 10 == 0:
                await asyncio.sleep(0.02)
        reading = asyncio.create_task(recorder.read_all())
        await link.finish(30)
        received = len(await reading)
        recorder.close()
        return received

    received = asyncio.run(scenario())
    assert 15 < received < 100
    assert (lab.cells[SENT], lab.cells[QUEUE_FULL]) == (received, 100 - received)
    assert lab.budget.used_bytes == 0


def test_exchanges_wait_for_a_recorder(lab: Lab) -> None:
    async def scenario() -> None:
        link = lab.link()
        for body in (b"a", b"b"):
            lab.hand_over(link, body)
        await asyncio.sleep(0.05)
        recorder = Recorder(lab.socket)
        await recorder.accept()
        lab.hand_over(link, b"c")
        reading = asyncio.create_task(recorder.read_all())
        await link.finish(30)
        assert bodies(await reading) == [b"a", b"b", b"c"]
        recorder.close()

    asyncio.run(scenario())
    assert (lab.cells[OFFERED], lab.cells[SENT]) == (3, 3)


def test_partly_sent_frame_is_sent_again_to_the_next_recorder(lab: Lab) -> None:
    large = b"y" * 5_000_000

    async def scenario() -> None:
        first = Recorder(lab.socket)
        link = lab.link()
        await first.accept()
        lab.hand_over(link, large)
        await first.read(1000)
        assert lab.cells[SENT] == 0
        first.close()
        lab.socket.unlink()
        second = Recorder(lab.socket)
        await second.accept()
        reading = asyncio.create_task(second.read_all())
        await link.finish(30)
        assert bodies(await reading) == [large]
        second.close()

    asyncio.run(scenario())
    assert (lab.cells[OFFERED], lab.cells[SENT]) == (1, 1)


def test_exchanges_without_a_recorder_are_counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tap.proxy.recorderlink.UNCONNECTED_S", 0.1)

    async def scenario() -> None:
        link = lab.link(queue_bytes=1_000_000)
        for _ in range(20):
            lab.hand_over(link, b"z" * 100_000)
        await link.finish(30)
        lab.hand_over(link, b"too late")

    asyncio.run(scenario())
    assert (lab.cells[OFFERED], lab.cells[RECORDER_OFF], lab.cells[SENT]) == (21, 21, 0)
    assert lab.budget.used_bytes == 0
