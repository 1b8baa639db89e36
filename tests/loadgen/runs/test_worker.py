"""A worker over real sockets, told what a run's parent would tell it."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.core.job import OpenJob, Send, Shard
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.core.settings import RunSettings
from loadgen.runs.messages import Done, Failed, FromParent, FromWorker, Go, Progress, Ready, Setup
from loadgen.runs.worker import serve
from tracefile.files.reading import load_trace
from tracefile.records.schema import Meta, Record, RequestId

Plan = Callable[[], Iterator[Send]]


@dataclass(frozen=True)
class ListedJob:
    """Requests of a test's own."""

    sends: Plan

    def open(self, shard: Shard) -> OpenJob:
        return OpenList(self.sends)


@dataclass
class OpenList:
    sends: Plan

    def plan(self) -> Iterator[Send]:
        return self.sends()

    def planned(self) -> int | None:
        return None

    def last_send_ms(self) -> float | None:
        return None

    def digest_share(self) -> int:
        return 7

    def findings(self) -> dict[str, int]:
        return {"looked": 1}


def request(name: str, tokens: int = 4) -> PlannedRequest:
    fields = {"model": "m", "prompt": [5, 6, 7], "max_tokens": tokens, "stream": True}
    return PlannedRequest(
        request_id=RequestId(name),
        path="/v1/completions",
        headers=request_headers(name, None),
        body=msgspec.json.encode(fields),
        model="m",
        max_tokens=tokens,
        prompt_tokens=3,
    )


def sends(*names: str, every_ms: float | None = 5.0) -> list[Send]:
    def send(name: str, due_ms: float | None) -> Send:
        return Send(due_ms, lambda: request(name))

    return [send(name, None if every_ms is None else index * every_ms) for index, name in enumerate(names)]


@dataclass
class Parent:
    """Tells a worker what it is to do, and keeps what it says."""

    url: str
    trace: Path
    parallel: int | None = None
    timeout_s: float | None = None
    messages: list[FromWorker] = field(default_factory=list)
    inbox: asyncio.Queue[FromParent | None] = field(default_factory=asyncio.Queue)
    when_sent: Callable[["Parent"], None] | None = None
    """Called once the first progress tells of a request in flight."""

    def run(self, plan: Plan) -> FromWorker:
        asyncio.run(asyncio.wait_for(self.serve(plan), 30))
        return self.messages[-1]

    def records(self) -> list[Record]:
        return load_trace(self.trace)[1]

    async def serve(self, plan: Plan) -> None:
        self.inbox.put_nowait(
            Setup(
                settings=RunSettings(url=self.url, trace=self.trace, timeout_s=self.timeout_s),
                job=ListedJob(plan),
                shard=Shard(0, 1),
                trace=self.trace,
                parallel=self.parallel,
            )
        )
        await serve(self.inbox, self.hear)

    def hear(self, message: FromWorker) -> None:
        self.messages.append(message)
        if isinstance(message, Ready):
            unix_ns = time.time_ns()
            self.inbox.put_nowait(Go(time.perf_counter_ns(), unix_ns, Meta(source="client", epoch_unix_ns=unix_ns)))
        elif isinstance(message, Progress) and message.counts.in_flight and self.when_sent is not None:
            act, self.when_sent = self.when_sent, None
            act(self)


def outcomes(records: list[Record]) -> dict[str, tuple[str, str | None]]:
    return {record.request_id: (record.status, record.error) for record in records}


def test_worker_stops_without_its_parent(engine: Any, tmp_path: Path) -> None:
    engine.stalls = True
    parent = Parent(engine.url, tmp_path / "t.jsonl", when_sent=lambda at: at.inbox.put_nowait(None))
    done = parent.run(lambda: iter(sends("a")))
    assert isinstance(done, Done)
    assert done.stopped == "parent gone"
    assert outcomes(parent.records()) == {"a": ("client_abort", None)}


def test_plan_error_ends_the_run(engine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> PlannedRequest:
        raise RuntimeError("the plan's own")

    parent = Parent(engine.url, tmp_path / "t.jsonl")
    failed = parent.run(lambda: iter([*sends("a"), Send(100.0, broken)]))
    assert failed == Failed("RuntimeError: the plan's own", is_input=False)
    assert "the plan's own" in capfd.readouterr().err


def test_error_is_reported_without_content(engine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> PlannedRequest:
        return request(str(int("canary")))

    failed = Parent(engine.url, tmp_path / "t.jsonl").run(lambda: iter([*sends("a"), Send(100.0, broken)]))
    assert isinstance(failed, Failed)
    assert re.fullmatch(r"ValueError at test_worker\.py:\d+", failed.text)
    assert failed.text in (messages := capfd.readouterr().err)
    assert "base 10" not in messages


def test_unreachable_url_is_an_input_error(tmp_path: Path) -> None:
    parent = Parent("http://127.0.0.1:1", tmp_path / "t.jsonl")
    failed = parent.run(lambda: iter(sends("a")))
    assert isinstance(failed, Failed)
    assert failed.is_input
    assert "--url: http://127.0.0.1:1: connection refused; expected a server on port 1" in failed.text
    assert not (tmp_path / "t.jsonl").exists()


def test_stale_connection_is_retried_by_the_sender(tmp_path: Path) -> None:
    answered: list[int] = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Response one request; the next one on the connection finds it closed."""
        await read_request(reader)
        answered.append(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
        await reader.read(1)
        writer.close()

    async def serve_and_run() -> Parent:
        async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            parent = Parent(f"http://127.0.0.1:{port}", tmp_path / "t.jsonl", parallel=1)
            await asyncio.wait_for(parent.serve(lambda: iter(sends("a", "b", "c", every_ms=None))), 30)
            return parent

    parent = asyncio.run(serve_and_run())
    assert outcomes(parent.records()) == dict.fromkeys("abc", ("ok", None))
    assert len(answered) == 3


ANSWER = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    await reader.readexactly(length)
