"""Several processes, one trace: workers that share a port, and a consistent account after crashes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tap.conftest import ANSWER, COMPLETION, upstream_of
from tests.waiting import until

HEAVY_MODULES = {"numpy", "transformers", "fastapi", "uvicorn", "httpx", "jinja2", "prometheus_client", "fsspec"}
PATIENCE_S = 30.0


def ended(pid: int) -> bool:
    """Whether a process has ended, collected by its parent or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def dropped(lab: Any) -> dict[str, int]:
    """The account's drops, once it is certain that it adds up."""
    summary = lab.summary
    reasons: dict[str, int] = summary["dropped"]
    assert summary["offered"] == summary["recorded"] + sum(reasons.values())
    assert summary["recorded"] == len(lab.records), "what counts as recorded is in the file"
    return reasons


def test_workers_share_a_port_and_write_one_trace(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port, "--workers", "3") as tap:
            assert len(tap.pids("tap.proxy.worker")) == 3
            answers = await asyncio.gather(*(tap.post("/v1/completions", COMPLETION) for _ in range(60)))
            assert all(b"200 OK" in answer for answer in answers)
            await tap.end()
            assert tap.code == 0, tap.errors

    asyncio.run(scenario())
    assert dropped(lab) == {}
    assert len({record.request_id for record in lab.records}) == 60
    assert max(record.concurrency for record in lab.records) > 1, "counted over all workers"


def test_workers_do_not_import_tokenizers_or_pages(lab: Any) -> None:
    code = "import sys, tap.proxy.worker; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=lab.environment(), capture_output=True, text=True, check=True
    )
    assert "wire" in loaded.stdout
    assert not HEAVY_MODULES & set(loaded.stdout.split())


def test_crashed_worker_is_restarted_and_its_requests_counted(lab: Any) -> None:
    started = asyncio.Event()

    async def script(request: Any) -> None:
        if b"stay" in request.target:
            request.write_sse_head()
            await request.write_event({"choices": [{"index": 0, "text": "x"}]})
            started.set()
            await request.reader.read()
        else:
            request.write_json(ANSWER)

    async def scenario() -> None:
        async with upstream_of(lab, script) as port, lab.command(port) as tap:
            for _ in range(5):
                await tap.post("/v1/completions", COMPLETION)
            staying = asyncio.create_task(tap.post("/v1/completions?stay", COMPLETION))
            await started.wait()
            [worker] = tap.pids("tap.proxy.worker")
            os.kill(worker, signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                assert not (await staying).endswith(b"0\r\n\r\n"), "no clean end for what was cut"
            assert b"200 OK" in await tap.post("/v1/completions", COMPLETION), "it waited for the next worker"
            assert tap.pids("tap.proxy.worker") != [worker]
            await tap.end()
            assert tap.code == 0
            assert "the worker process died" in tap.errors

    asyncio.run(scenario())
    assert lab.summary["offered"] == 7
    lost = dropped(lab)
    assert set(lost) == {"worker_died"}
    assert 1 <= lost["worker_died"] <= 6, "the one in flight, and what had not left for the recorder yet"


def test_crashed_recorder_continues_the_trace(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port, "--workers", "2") as tap:

            async def send(count: int) -> None:
                for _ in range(count):
                    assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)

            for _ in range(2):
                recorder = tap.recorder_pid()
                await send(5)
                os.kill(recorder, signal.SIGKILL)
                await send(5)
                await until(lambda killed=recorder: tap.pids("tap.recorder.recorder") not in ([], [killed]))
            await send(5)
            await tap.end()
            assert tap.code == 0, tap.errors
            assert "the recorder process died" in tap.errors

    asyncio.run(scenario())
    assert lab.summary["offered"] == 25
    lost = dropped(lab)
    assert set(lost) <= {"recorder_died", "recorder_off"}, "off: where starting it took longer than workers wait"
    assert len(lab.records) == 25 - sum(lost.values())


def test_second_signal_aborts_the_drain(lab: Any) -> None:
    started = asyncio.Event()

    async def stuck(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x"}]})
        started.set()
        await request.reader.read()

    async def scenario() -> None:
        async with (
            upstream_of(lab, stuck) as port,
            lab.command(port, "--no-engine-facts", "--drain", "600s", "--workers", "2") as tap,
        ):
            in_flight = asyncio.create_task(tap.post("/v1/completions", {**COMPLETION, "stream": True}))
            await started.wait()
            tap.process.send_signal(signal.SIGTERM)
            await until(lambda: refuses(tap.port))
            assert not in_flight.done()
            await tap.end()
            assert not (await in_flight).endswith(b"0\r\n\r\n")
            assert tap.code == 0
            assert "1 responses were aborted" in tap.errors

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error) == ("client_abort", "tap_ended")
    assert dropped(lab) == {}


def test_pending_connections_are_served_before_the_drain(lab: Any) -> None:
    """A worker that was busy for a while finds requests and the word to drain at once: requests go first."""

    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port) as tap:
            remaining = await asyncio.open_connection("127.0.0.1", tap.port)
            await request_on(*remaining)
            [worker] = tap.pids("tap.proxy.worker")
            os.kill(worker, signal.SIGSTOP)
            waiting = [asyncio.create_task(tap.post("/v1/completions", COMPLETION)) for _ in range(20)]
            again = asyncio.create_task(request_on(*remaining))
            await asyncio.sleep(0.2)
            tap.process.send_signal(signal.SIGTERM)
            await tap.printed("ending:")
            await asyncio.sleep(0.2)
            os.kill(worker, signal.SIGCONT)
            answers = await asyncio.gather(*waiting)
            assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 20
            assert b"200 OK" in await again
            remaining[1].close()
            await asyncio.wait_for(tap.process.wait(), PATIENCE_S)

    asyncio.run(scenario())
    assert dropped(lab) == {}
    assert len(lab.records) == 22


async def request_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of an answer on a connection that is kept."""
    body = json.dumps(COMPLETION).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = re.findall(rb"(?i)content-length: (\d+)", head)
    await reader.readexactly(int(length))
    return head


def refuses(port: int) -> bool:
    """Whether nothing listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_children_of_a_killed_supervisor_finish_recording(lab: Any) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> None:
        started.set()
        await finish.wait()
        request.write_json(ANSWER)

    async def scenario() -> None:
        async with (
            upstream_of(lab, slow) as port,
            lab.command(port, "--no-engine-facts", "--workers", "2") as tap,
        ):
            in_flight = asyncio.create_task(tap.post("/v1/completions", COMPLETION))
            await started.wait()
            pids = [*tap.pids("tap.proxy.worker"), tap.recorder_pid()]
            tap.process.kill()
            await until(lambda: ended(tap.process.pid))
            finish.set()
            assert b"200 OK" in await in_flight, "what was in flight had its time"
            await until(lambda: all(map(ended, pids)))

    asyncio.run(scenario())
    assert len(lab.records) == 1
