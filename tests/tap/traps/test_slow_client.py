"""A client that reads slowly, or not at all: the upstream waits; what the tap holds stays within its bounds."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import standstill

PIECE = b"x" * 65536
KERNEL = Path("/proc/sys/net/ipv4/tcp_rmem")
BOUND = (int(KERNEL.read_text().split()[2]) if KERNEL.exists() else 16 << 20) + (8 << 20)
"""Most bytes that a receive buffer grows to, by Linux's setting, and 8 MiB for other buffers and the tap's own."""
PIECES = 2 * BOUND // len(PIECE)
WANTED = PIECES * len(PIECE)


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_slow_client_pauses_the_upstream(rig: Any, framing: str) -> None:
    heads = {
        "length": b"Content-Length: %d\r\n" % WANTED,
        "chunked": b"Transfer-Encoding: chunked\r\n",
        "close": b"",
    }
    written = 0

    async def upstream(peer: Any) -> None:
        nonlocal written
        await peer.head()
        peer.writer.write(b"HTTP/1.1 200 OK\r\n" + heads[framing] + b"\r\n")
        for _ in range(PIECES):
            peer.writer.write(b"10000\r\n" + PIECE + b"\r\n" if framing == "chunked" else PIECE)
            await peer.writer.drain()
            written += len(PIECE)
        peer.writer.write(b"0\r\n\r\n" if framing == "chunked" else b"")
        await peer.writer.drain()

    async def scenario() -> None:
        async with rig.tap(upstream, send_buffer=65536) as tap:
            client = await tap.connect(receive_buffer=65536)
            client.writer.transport.pause_reading()
            await client.write(b"GET /big HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            assert await standstill(lambda: written) < BOUND
            client.writer.transport.resume_reading()
            body = (await client.until_closed()).partition(b"\r\n\r\n")[2]
            assert body.count(b"x") == WANTED

    rig.run(scenario())


def test_captures_are_dropped_within_the_memory_budget(rig: Any) -> None:
    """The recorder's copies are bounded together; the streams themselves go on. None ends before all have come far."""
    budget = 1 << 20
    all_far, go_on = asyncio.Barrier(8), asyncio.Event()

    async def upstream(peer: Any) -> None:
        await peer.read_until(b"{}")
        await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(7):
            await peer.write(b"10000\r\n" + PIECE + b"\r\n")
        await go_on.wait()
        await peer.write(b"10000\r\n" + PIECE + b"\r\n")
        await peer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        async with rig.tap(upstream, queue_bytes=budget) as tap:
            request = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"

            async def ask() -> int:
                client = await tap.connect()
                await client.write(request)
                started = await client.exactly(7 * len(PIECE))
                await all_far.wait()
                assert tap.budget.used_bytes <= budget
                go_on.set()
                body = (started + await client.until_closed()).partition(b"\r\n\r\n")[2]
                return int(body.count(b"x"))

            assert await asyncio.gather(*(ask() for _ in range(8))) == [8 * len(PIECE)] * 8
            assert len(tap.copies.exchanges) + tap.copies.dropped["queue_full"] == 8
            assert tap.copies.dropped["queue_full"] > 0

    rig.run(scenario())


def test_slow_upstream_applies_back_pressure(rig: Any) -> None:
    go_on = asyncio.Event()
    read = 0

    async def upstream(peer: Any) -> None:
        nonlocal read
        await peer.head()
        peer.writer.transport.pause_reading()
        await go_on.wait()
        peer.writer.transport.resume_reading()
        while read < WANTED:
            read += len(await peer.reader.read(1 << 20))
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            written = 0

            async def upload() -> None:
                nonlocal written
                for _ in range(PIECES):
                    client.writer.write(PIECE)
                    await client.writer.drain()
                    written += len(PIECE)

            head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            await client.write(head % WANTED)
            uploading = asyncio.create_task(upload())
            assert await standstill(lambda: written) < BOUND
            go_on.set()
            await uploading
            assert (await client.until_closed()).endswith(b"ok")

    rig.run(scenario())


SMALL = 4096
"""A kernel buffer so small that most of an answer of this size stays in the tap's own, below its high-water mark."""
ANSWER = b"x" * 60_000


def test_early_response_is_read_slowly(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that closes under a client's bytes lingers; that time begins when the answer has been read."""
    monkeypatch.setattr("wire.server.LINGER_S", 0.02)

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream, tap_send_buffer=SMALL) as tap:
            client = await tap.connect(receive_buffer=SMALL)
            client.writer.transport.pause_reading()
            await client.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\nhalf of it")
            await asyncio.sleep(0.3)
            client.writer.transport.resume_reading()
            answer = await client.until_closed()
            assert answer.partition(b"\r\n\r\n")[2] == ANSWER
            await tap.upstream_left()

    rig.run(scenario())


def test_client_that_never_reads_is_disconnected(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.server.KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr("wire.server.SWEEP_S", 0.05)

    async def upstream(peer: Any) -> None:
        await peer.head()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
        await peer.until_closed()

    async def scenario() -> None:
        async with rig.tap(upstream, tap_send_buffer=SMALL) as tap:
            client = await tap.connect(receive_buffer=SMALL)
            client.writer.transport.pause_reading()
            await client.write(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n")
            while tap.server.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    rig.run(scenario())


def test_stalled_request_body_releases_the_upstream(rig: Any) -> None:
    async def upstream(peer: Any) -> None:
        await peer.head()
        assert await peer.until_closed() == b"half"

    async def scenario() -> None:
        async with rig.tap(upstream, body_stall_s=0.2) as tap:
            answer = await tap.ask(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 8\r\n\r\n", b"half")
            assert answer.status == 408
            assert b"stopped coming" in answer.body
            await tap.upstream_left()
        assert tap.copies.outcomes == [("client_abort", None, None)]

    rig.run(scenario())


def test_slow_head_times_out(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.server.KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr("wire.server.SWEEP_S", 0.05)

    async def upstream(peer: Any) -> None:
        raise AssertionError("there was no request")

    async def scenario() -> None:
        async with rig.tap(upstream) as tap:
            client = await tap.connect()
            await client.write(b"GET / HTTP/1.1\r\nHost: t\r\nX: ")
            while tap.server.num_connections:
                client.writer.write(b"x")
                await asyncio.sleep(0.01)

    rig.run(scenario())


def test_slow_body_does_not_time_out(rig: Any) -> None:
    body = b"slow but sure"

    async def upstream(peer: Any) -> None:
        await peer.head()
        assert await peer.exactly(len(body)) == body
        await asyncio.sleep(1.2)  # the upstream's time is not the client's stall
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with rig.tap(upstream, body_stall_s=1.0) as tap:
            client = await tap.connect()
            await client.write(b"POST / HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 13\r\n\r\n")
            for at in range(len(body)):
                await client.write(body[at : at + 1])
                await asyncio.sleep(0.02)
            assert (await client.until_closed()).endswith(b"ok")

    rig.run(scenario())
