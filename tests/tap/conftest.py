"""A scripted upstream of raw bytes, a raw client, and a tap between them with its own recorder process."""

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.access import OPEN
from engines.dialect import DialectName
from engines.facts import EngineFacts
from tap.ipc.messages import UpstreamEntry
from tap.ipc.settings import Settings
from tap.ipc.sharedmemory import WorkerCounts
from tap.proxy.capture_buffer import CaptureBudget
from tap.proxy.injectingrelay import new_relays
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.relay import Relays
from tap.proxy.routing import live_policy
from tap.proxy.upstreams import Upstreams
from tap.supervisor.account import Account, Ledger
from tap.supervisor.service import recorder_socket, recording, runtime_folder
from tap.supervisor.startup import recorder_setup, spoken_dialect
from tests.warmstart import WarmProcess, warm_children, warm_process
from tests.wire.timedclient import listen
from tracefile.files.reading import load_trace
from tracefile.hashing.hashkey import HashKey, load_key
from tracefile.records.schema import Meta, Record
from wire.server import Server
from wire.url import Origin

ROOT = Path(__file__).parent.parent.parent
UNKNOWN = EngineFacts()


@dataclass
class RawRequest:
    """A request as the upstream read it, and the connection to answer on."""

    head: bytes
    body: bytes
    """Without chunk framing."""
    raw_body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]

    def values(self, name: bytes) -> list[bytes]:
        lines = self.head.split(b"\r\n")[1:]
        pairs = [line.partition(b": ") for line in lines if line]
        return [value for key, _, value in pairs if key.lower() == name]

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def write_json(self, value: object, status: bytes = b"200 OK", extra: bytes = b"") -> None:
        body = json.dumps(value).encode()
        self.write(b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%b" % (status, extra))
        self.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def write_sse_head(self) -> None:
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        self.write(b"Transfer-Encoding: chunked\r\n\r\n")

    async def write_event(self, value: object) -> None:
        """Write one event as one chunk, with a pause so that each event is a separate read."""
        text = b"[DONE]" if value is None else json.dumps(value).encode()
        data = b"data: %b\n\n" % text
        self.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()
        await asyncio.sleep(0.002)

    def end_chunks(self) -> None:
        self.write(b"0\r\n\r\n")


Script = Callable[[RawRequest], Awaitable[None]]


@dataclass
class ScriptedUpstream:
    """Answers every request by the script; keeps what it read."""

    script: Script
    requests: list[RawRequest] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A connection was closed by the other side."""
    connections: int = 0
    port: int = 0

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        """Serve on ``port``; 0: a free port."""
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            try:
                await self._converse(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                self.gone.set()
                writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", self.port, limit=1 << 26, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            request = RawRequest(head, b"", b"", reader, writer)
            if request.values(b"transfer-encoding"):
                request.raw_body, request.body = await read_chunked(reader)
            else:
                length = int((request.values(b"content-length") or [b"0"])[0])
                request.body = request.raw_body = await reader.readexactly(length)
            self.requests.append(request)
            await self.script(request)
            await writer.drain()


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    raw, body = b"", b""
    while True:
        line = await reader.readuntil(b"\r\n")
        piece = await reader.readexactly(int(line.partition(b";")[0], 16) + 2)
        raw, body = raw + line + piece, body + piece[:-2]
        if piece == b"\r\n":
            return raw, body


@dataclass
class RawResponse:
    """A response as the client read it, up to the connection's end."""

    raw: bytes

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def raw_body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]

    @property
    def ended_cleanly(self) -> bool:
        """For a chunked response: the last chunk came."""
        return self.raw_body.endswith(b"0\r\n\r\n")


@dataclass
class RunningTap:
    """A tap in this process; its recorder is a process of its own."""

    port: int
    link: RecorderLink
    relays: Relays
    budget: CaptureBudget
    server: Server

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)

    async def send(self, data: bytes) -> RawResponse:
        """Send bytes on a connection of their own and read until the tap closes it."""
        reader, writer = await self.connect()
        writer.write(data)
        raw = await reader.read()
        writer.close()
        return RawResponse(raw)

    async def post(self, path: str, value: object, headers: bytes = b"") -> RawResponse:
        return await self.send(post_bytes(path, value, headers + b"Connection: close\r\n"))


def settings_of(**changes: Any) -> Settings:
    """Settings of a tap before vLLM, with blocks of four tokens."""
    defaults: dict[str, Any] = {
        "upstreams_file": None,
        "route": "round-robin",
        "workers": 1,
        "rotate_bytes": None,
        "rotate_s": None,
        "resume": False,
        "keep_headers": (),
        "upload": None,
        "inject": frozenset(),
        "inject_auto": False,
        "dialect": "vllm",
        "admin": None,
        "listen": ("127.0.0.1", 0),
        "access": OPEN,
        "keep_s": None,
        "tokenizer": "ids",
        "block_size": 4,
        "algorithm": "xxh3_64",
        "key_file": None,
        "model": None,
        "loras": (),
        "max_body_bytes": 1 << 20,
        "queue_bytes": 64 << 20,
        "engine_facts": False,
        "file_mode": 0o600,
        "drain_s": 5.0,
        "overwrite": False,
        "upstreams": (Origin("http", "127.0.0.1", 9),),
    }
    return Settings(**(defaults | changes))


def entries_of(origins: Iterable[Origin], dialect: DialectName | None = None) -> list[UpstreamEntry]:
    """Upstreams as the supervisor lists them, all well."""
    return [UpstreamEntry(str(origin), slot, dialect=dialect) for slot, origin in enumerate(origins)]


def post_bytes(path: str, value: object, headers: bytes = b"") -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = b"POST %b HTTP/1.1\r\nHost: tap\r\nContent-Type: application/json\r\n%b" % (path.encode(), headers)
    return lines + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "KVTAPE_KEY_FILE": str(folder / "keys" / "key")}


class TapCommand:
    """A running ``tap`` command; its output is known once it has ended."""

    def __init__(self, process: asyncio.subprocess.Process | WarmProcess, port: int, first_line: str) -> None:
        self.process, self.port = process, port
        self.output, self.errors, self.code = first_line, "", -1

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        output, errors = await asyncio.wait_for(self.process.communicate(), 30)
        self.output += output.decode()
        self.errors += errors.decode()
        self.code = self.process.returncode if self.process.returncode is not None else -1

    async def printed(self, what: str) -> str:
        """The line on stderr with ``what`` in it, once it comes."""
        assert self.process.stderr is not None
        while what not in (line := (await self.process.stderr.readline()).decode()):
            assert line, f"ended without saying {what!r}"
            self.errors += line
        self.errors += line
        return line

    async def post(self, path: str, value: object, headers: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(value).encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: t\r\nConnection: close\r\n%b" % (path.encode(), headers))
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        raw = await reader.read()
        writer.close()
        return raw

    def pids(self, module: str) -> list[int]:
        """Its children that run ``module``, oldest first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        pids = []
        for pid in sorted(map(int, children)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    pids.append(pid)
        return pids + warm_children(self.process.pid, module)

    def recorder_pid(self) -> int:
        [recorder] = self.pids("tap.recorder.recorder")
        return recorder


@contextlib.asynccontextmanager
async def tap_command(
    folder: Path,
    upstream_port: int,
    *extra: str,
    warm: bool = True,
) -> AsyncIterator[TapCommand]:
    """``tap`` in front of a port.

    ``warm``: forked, as ``tests.warmstart`` does, without the arguments, environment and memory that the system tells
    of a process of its own.
    """

    command = (
        *("tap", "--listen", "127.0.0.1:0"),
        *(() if {"--upstream", "--upstreams"} & set(extra) else ("--upstream", f"http://127.0.0.1:{upstream_port}")),
        *("-o", str(folder / "captured.jsonl"), "--tokenizer", "ids", *extra),
    )
    process: asyncio.subprocess.Process | WarmProcess
    if warm:
        process = await warm_process(*command, env=environment(folder))
    else:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command),
            env=environment(folder),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    assert process.stdout is not None
    first_line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    match = re.match(r"tap: listening on https?://127\.0\.0\.1:(\d+), recording to \S+, upstream https?://", first_line)
    if match is None:
        _, errors = await process.communicate()
        raise AssertionError(f"no start: {first_line}{errors.decode()}")
    tap = TapCommand(process, int(match[1]), first_line)
    try:
        yield tap
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # closes the pipes, also of a killed process


@dataclass
class Lab:
    """Starts taps in front of scripted upstreams and reads their traces."""

    folder: Path
    key: HashKey
    counts: Account = field(default_factory=Account)

    @property
    def trace(self) -> Path:
        return self.folder / "captured.jsonl"

    def upstream(self, script: Script) -> ScriptedUpstream:
        return ScriptedUpstream(script)

    @contextlib.asynccontextmanager
    async def tap(
        self,
        script: Script,
        *,
        facts: EngineFacts = UNKNOWN,
        **settings: Any,
    ) -> AsyncIterator[tuple[RunningTap, ScriptedUpstream]]:
        """A tap for the length of the block."""
        upstream = ScriptedUpstream(script)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(upstream.serving())
            config = self.config(upstream.port, **settings)
            folder = stack.enter_context(runtime_folder())
            budget, counts = CaptureBudget(config.queue_bytes), WorkerCounts(folder, 1)
            ledger = Ledger(counts, 1)
            setup = recorder_setup(config, self.key, facts, recorder_socket(folder))
            async with recording(setup, ledger):
                link = RecorderLink(recorder_socket(folder), budget, counts)
                entries = entries_of(config.upstreams, spoken_dialect(config, facts))
                upstreams = Upstreams(entries, live_policy(config.route))
                relays = new_relays(
                    *(upstreams, link, budget, config.max_body_bytes, config.keep_headers),
                    requested=config.inject,
                )
                server = Server(relays.new_relay)
                port = await listen(server)
                yield RunningTap(port, link, relays, budget, server), upstream
                await server.drain(5.0)
                upstreams.close()
                await link.finish(30.0)
            self.counts = ledger.account(ended=True)
        assert budget.used_bytes == 0, "a copy was neither handed over nor released"
        assert relays.in_flight == 0

    def command(
        self, upstream_port: int, *extra: str, **settings: Any
    ) -> contextlib.AbstractAsyncContextManager[TapCommand]:
        """A tap of processes for the length of the block, as ``tap_command`` starts it."""
        return tap_command(self.folder, upstream_port, *extra, **settings)

    def environment(self) -> dict[str, str]:
        """What a tap of processes finds around it."""
        return environment(self.folder)

    @property
    def summary(self) -> Any:
        """The account beside the trace."""
        return json.loads(Path(f"{self.trace}.summary.json").read_text())

    def config(self, upstream_port: int, **settings: Any) -> Settings:
        origin = Origin("http", "127.0.0.1", upstream_port, settings.pop("base_path", ""))
        return settings_of(**{"upstreams": (origin,), "trace": str(self.trace)} | settings)

    def read(self) -> tuple[Meta, list[Record]]:
        return load_trace(self.trace)

    @property
    def records(self) -> list[Record]:
        return self.read()[1]


COMPLETION = {"model": "m", "prompt": list(range(12)), "max_tokens": 4}
ANSWER = {
    "choices": [{"index": 0, "text": "t", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 1},
}


async def answer(request: RawRequest) -> None:
    request.write_json(ANSWER)


@contextlib.asynccontextmanager
async def upstream_of(lab: Lab, script: Script = answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A scripted upstream alone; gives its port."""
    upstream = lab.upstream(script)
    async with upstream.serving(tls):
        yield upstream.port


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, load_key(tmp_path / "key"))
