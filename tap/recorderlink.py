"""The relay's end of the recorder process: starts it, feeds it without ever waiting, counts what it lost."""

import asyncio
import copy
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from tap.exchange import Progress, Ready, RecorderSetup, Refused, encode_frame, split_frames
from tap.sidecopy import CopyBudget, SideCopy
from tracefile.errors import InputError
from tracefile.schema import Status

RESTARTS = 1
START_TIMEOUT_S = 120.0
REAP_S = 1.0
OUTBOX_S = 0.01
PROJECT_ROOT = str(Path(__file__).resolve().parent.parent)

_replies = msgspec.msgpack.Decoder(Ready | Refused | Progress)


@dataclass(slots=True)
class Counts:
    """What became of every recordable exchange: offered = recorded + the sum of dropped, once the tap has ended."""

    offered: int = 0
    recorded: int = 0
    hashed: int = 0
    prompt_counts_checked: int = 0
    prompt_counts_matched: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unhashed: Counter[str] = field(default_factory=Counter)

    def add(self, progress: Progress) -> None:
        """Add the final counts of one recorder process."""
        self.recorded += progress.recorded
        self.hashed += progress.hashed
        self.prompt_counts_checked += progress.prompt_counts_checked
        self.prompt_counts_matched += progress.prompt_counts_matched
        self.dropped.update(progress.dropped)
        self.unhashed.update(progress.unhashed)


class RecorderProcess(asyncio.Protocol):
    """One recorder process and the socket to it; ``progress`` is the last that it told."""

    def __init__(self, setup: RecorderSetup) -> None:
        self._setup = setup
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self.progress = Progress()
        self.submitted = 0
        self.closing = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the process and give it its setup; it may be fed from now on, ready or not."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            path = os.pathsep.join(filter(None, (PROJECT_ROOT, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(  # noqa: ASYNC220  once, at start: it returns when the fork has
                [sys.executable, "-P", "-m", "tap.recorder", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self._write(encode_frame(self._setup))

    @property
    def pid(self) -> int | None:
        """The process's id; null before it started."""
        return None if self._process is None else self._process.pid

    @property
    def queued_bytes(self) -> int:
        """Bytes handed over that the process has not taken yet."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return written + self._outbox_bytes

    def submit(self, frame: bytes) -> None:
        """Hand over one exchange; never waits. Several leave together: waking the process costs more than writing."""
        self.submitted += 1
        if not self._outbox:
            asyncio.get_running_loop().call_later(OUTBOX_S, self._empty_outbox)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)

    def finish(self) -> None:
        """Tell the process that there is no more; ``gone`` comes when it has written everything."""
        self.closing = True
        self._empty_outbox()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def reap(self) -> None:
        """Collect the process, whose socket is closed: at once if it has ended, else killed and a little later."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            asyncio.get_running_loop().call_later(REAP_S, self._process.poll)

    async def ended(self) -> None:
        """Wait until the process has left, having closed its socket."""
        for _ in range(100):
            if self._process is None or self._process.poll() is not None:
                return
            await asyncio.sleep(0.01)
        self.reap()

    def abort(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    def _empty_outbox(self) -> None:
        if self._outbox:
            self._write(b"".join(self._outbox))
            self._outbox.clear()
            self._outbox_bytes = 0

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the process's replies."""
        self._buffer += data
        for payload in split_frames(self._buffer):
            reply = _replies.decode(payload)
            if isinstance(reply, Progress):
                self.progress = reply
            elif isinstance(reply, Refused):
                if not self.ready.done():
                    self.ready.set_exception(InputError(reply.reason))
            elif not self.ready.done():
                self.ready.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended, as asked or not."""
        self._transport = None
        if not self.ready.done():
            self.ready.set_exception(InputError("the recorder process ended before it could record"))
            self.ready.exception()
        if not self.gone.done():
            self.gone.set_result(None)


class RecorderLink:
    """Feeds one recorder; restarts it once if it dies, into a trace beside the first, and says all of it loudly."""

    def __init__(self, setup: RecorderSetup, budget: CopyBudget) -> None:
        self._setup = setup
        self._budget = budget
        self._process: RecorderProcess | None = None
        self._restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = Counts()
        """Of processes that are gone."""
        self.traces = [setup.trace]

    @property
    def recorder_pid(self) -> int | None:
        """The recorder's process id; null while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start recording. Raises InputError if the tokenizer cannot be loaded or the trace not be written."""
        self._process = await self._launch(self._setup)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._process.ready
        except TimeoutError:
            self._process.abort()
            raise InputError(f"the recorder is not ready after {START_TIMEOUT_S:.0f} s") from None
        finally:
            if not self._process.ready.done() or self._process.ready.exception() is not None:
                self._process.closing = True

    def submit(self, side: SideCopy, end_ns: int, outcome: Status, error_kind: str | None) -> None:
        """Hand over a finished exchange, or count why not. Never waits, never raises."""
        self._ended.offered += 1
        if self._process is None:
            side.give_up("recorder_off")
        elif self._process.queued_bytes + self._budget.held_bytes > self._budget.limit_bytes:
            side.give_up("queue_full")
        if side.dropped is not None:
            self._ended.dropped[side.dropped] += 1
            return
        assert self._process is not None
        self._process.submit(encode_frame(side.finish(end_ns, outcome, error_kind)))

    def counts(self) -> Counts:
        """What is known so far; exact after ``finish``."""
        counts = copy.deepcopy(self._ended)
        if self._process is not None:
            counts.add(self._process.progress)
        return counts

    async def finish(self, timeout_s: float) -> None:
        """Let the recorder write everything it was given, for at most ``timeout_s``, and end it."""
        if self._process is None:
            return
        process = self._process
        process.finish()
        done, _ = await asyncio.wait([process.gone], timeout=timeout_s)
        if not done:
            _say(f"the recorder did not finish within {timeout_s:.0f} s; what it had left is lost")
            process.abort()
        self._account(process)
        self._process = None
        await process.ended()

    async def _launch(self, setup: RecorderSetup) -> RecorderProcess:
        process = RecorderProcess(setup)
        await process.start()
        process.gone.add_done_callback(lambda _: self._on_gone(process))
        return process

    def _on_gone(self, process: RecorderProcess) -> None:
        if process.closing:
            return
        process.closing = True
        self._account(process)
        self._process = None
        process.reap()
        if self._restarts >= RESTARTS:
            _say("the recorder process died again: RECORDING IS OFF; serving goes on, drops are counted")
            return
        self._restarts += 1
        task = asyncio.get_running_loop().create_task(self._restart())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self) -> None:
        trace = free_name(self._setup.trace)
        _say(f"the recorder process died; what it had not written is lost; recording goes on in {trace}")
        self.traces.append(trace)
        self._process = await self._launch(msgspec.structs.replace(self._setup, trace=trace))
        try:
            await self._process.ready
        except InputError as error:
            _say(f"RECORDING IS OFF: {error}; serving goes on, drops are counted")

    def _account(self, process: RecorderProcess) -> None:
        """Move a process's counts over; what it was given and never told of is lost."""
        self._ended.add(process.progress)
        lost = process.submitted - process.progress.recorded - sum(process.progress.dropped.values())
        if lost:
            self._ended.dropped["recorder_died"] += lost


def free_name(trace: str) -> str:
    """A name beside ``trace`` that no file has: ``a.jsonl.zst`` gives ``a.2.jsonl.zst``."""
    path = Path(trace)
    suffixes = "".join(path.suffixes[-2:])
    stem = path.name.removesuffix(suffixes)
    number = 2
    while (candidate := path.with_name(f"{stem}.{number}{suffixes}")).exists():
        number += 1
    return str(candidate)


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
