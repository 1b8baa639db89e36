"""A shard: one part of a run's sessions, from its job to its records; a local process, or within an actor elsewhere."""

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.core.bodies import prepare_tables
from loadgen.core.job import OpenJob
from loadgen.core.request import origin_of
from loadgen.runs.resumption import ended_requests
from loadgen.runs.shardmessages import (
    UNSENT,
    Done,
    Failed,
    FromParent,
    FromShard,
    Go,
    Progress,
    Ready,
    Setup,
    Stop,
    decode,
    encode,
)
from loadgen.sending.crossing import (
    Connected,
    Halt,
    Order,
    Orders,
    Pulse,
    SenderSetup,
    Unreachable,
    from_sender,
)
from loadgen.sending.crossing import encode as encode_order
from loadgen.sending.lookahead import Clocks
from loadgen.sending.planrun import FromSender, PlanRun
from measure.metrics.client import with_delays
from measure.tally import Tally
from tracefile import InputError, TraceWriter
from tracefile.records.errors import failure_words
from wire.errors import LossKind
from wire.loop import run
from wire.process import FrameSocket, parent_socket, reap_child, start_child

WARM_CONNECTIONS = 16
"""Connections opened before the first request without a limit; more are opened as needed."""
MOST_WARM_CONNECTIONS = 256
PROGRESS_INTERVAL_S = 0.25
SENDER_LEAVE_S = 5.0
"""Longest time a sender may take to end once it is told to."""

Receive = Callable[[], Awaitable[FromParent | None]]
"""The parent's next message; null: the parent is gone."""
Say = Callable[[FromShard], None]


class SenderProcess:
    """The shard's side of its sender's process. ``hear`` gets its messages, ``lost`` is called if it dies."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self._process, self._url = process, url
        self._socket: FrameSocket | None = None
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self.hear: Callable[[FromSender], None] = _unexpected
        self.lost: Callable[[], None] = _ignore_end

    @classmethod
    async def start(cls, setup: SenderSetup) -> "SenderProcess":
        """Start it and open its connections. Raises InputError if they cannot be opened."""
        process, sock = start_child("loadgen.sending.sender")
        sender = cls(process, setup.url)
        sender._socket = await FrameSocket(sender._take, sender._end).attach(sock)
        sender._say(setup)
        try:
            await sender._connected
        except BaseException:
            await sender.close()
            raise
        return sender

    def give(self, orders: list[Order]) -> None:
        self._say(Orders(orders))

    def halt(self, kind: LossKind | None = None) -> None:
        self._say(Halt(kind))

    async def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        await reap_child(self._process, SENDER_LEAVE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _say(self, message: SenderSetup | Orders | Halt) -> None:
        if self._socket is not None:
            self._socket.send(encode_order(message))

    def _take(self, payload: bytes) -> None:
        message: Any = from_sender.decode(payload)
        if isinstance(message, Connected):
            self._connected.set_result(None)
        elif isinstance(message, Unreachable):
            self._connected.set_exception(InputError(f"--url: {self._url}: {message.reason}"))
        else:
            self.hear(message)

    def _end(self) -> None:
        if self._closing:
            return
        if not self._connected.done():
            self._connected.set_exception(RuntimeError("the sender process ended before its connections were open"))
        else:
            self.lost()


def _unexpected(message: FromSender) -> None:
    if isinstance(message, Pulse):
        return
    raise AssertionError(f"unexpected message: {type(message).__name__}")


def _ignore_end() -> None:
    """Nothing is sent yet."""


@dataclass(frozen=True, slots=True)
class Parent:
    """Both ways to the parent."""

    receive: Receive
    say: Say


async def serve(receive: Receive, say: Say) -> None:
    """Run one shard for one parent; the last message is ``Done`` or ``Failed``, unless ``Go`` never came."""
    try:
        setup = await receive()
        if isinstance(setup, Setup):
            await _serve(setup, receive, say)
    except InputError as error:
        say(Failed(str(error), is_input=True))
    except Exception as error:  # whatever it is, the parent must not wait for ever
        traceback.print_tb(error.__traceback__)
        text = failure_words(error)
        print(text, file=sys.stderr)
        say(Failed(text, is_input=False))


async def _serve(setup: Setup, receive: Receive, say: Say) -> None:
    prepare_tables()
    starting = asyncio.create_task(SenderProcess.start(_sender_setup(setup)))
    try:
        opened = setup.job.open(setup.shard)
        share = opened.digest_share()
        if setup.resumed is not None:
            opened.resume(ended_requests(setup.resumed))
        sender = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    try:
        say(Ready(share, opened.planned(), opened.last_send_ms()))
        go = await receive()
        if isinstance(go, Go):
            say(await _run(setup, go, opened, sender, Parent(receive, say)))
    finally:
        await sender.close()


async def _run(setup: Setup, go: Go, opened: OpenJob, sender: SenderProcess, parent: Parent) -> Done:
    clocks = clocks_of(go)
    begin_ns = clocks.t0_ns + round(go.from_ms * 1e6)
    tally = Tally()
    cpu_before_s = time.process_time()
    resumes = setup.resumed is not None and setup.resumed == setup.trace
    with (
        collector_off(),
        TraceWriter(setup.trace, go.meta, overwrite=setup.overwrite, append=resumes) as writer,
    ):
        running = PlanRun(
            opened.plan(),
            sender,
            writer.write,
            tally,
            origin=origin_of(setup.url),
            access=setup.access.headers,
            clocks=clocks,
            not_before_ns=begin_ns,
            ends_ns=None if setup.ends_ms is None else clocks.t0_ns + round(setup.ends_ms * 1e6),
            alone=setup.shard.count == 1,
        )
        sender.hear, sender.lost = running.hear, running.sender_lost
        running.start()
        heeding = asyncio.create_task(_heed(parent.receive, running))
        telling = asyncio.create_task(_tell(tally, parent.say))
        try:
            await running.over
        finally:
            heeding.cancel()
            telling.cancel()
            running.close()
            writer.change_meta(with_delays(go.meta, running.loop_delay_ms, running.crossing_delay_ms))
    return Done(
        tally=tally,
        findings=opened.findings() | ({} if setup.ends_ms is None else {UNSENT: running.unsent}),
        sent_share=running.sent_share,
        reason=running.reason,
        stopped=running.stopped,
        seconds=max(0, running.last_end_ns - begin_ns) / 1e9,
        shard_cpu_s=time.process_time() - cpu_before_s,
        sender_cpu_s=running.sender_cpu_ns / 1e9,
        loop_delay_ms=running.loop_delay_ms,
        crossing_delay_ms=running.crossing_delay_ms,
    )


async def _heed(receive: Receive, running: PlanRun) -> None:
    while True:
        message = await receive()
        if isinstance(message, Stop):
            running.stop(message.reason)
        elif message is None:
            running.stop("parent gone")
            return


async def _tell(tally: Tally, say: Say) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        say(Progress(tally.counts(), tally.take_recent()))


def clocks_of(go: Go) -> Clocks:
    """t = 0 and the trace's zero on this machine's clock."""
    t0_ns = go.t0_ns
    if t0_ns is None:
        t0_ns = time.perf_counter_ns() + go.t0_unix_ns - time.time_ns()
    zero_unix_ns = go.t0_unix_ns if go.meta.epoch_unix_ns is None else go.meta.epoch_unix_ns
    return Clocks(t0_ns, t0_ns - (go.t0_unix_ns - zero_unix_ns))


def _sender_setup(setup: Setup) -> SenderSetup:
    warm = WARM_CONNECTIONS if setup.parallel is None else min(setup.parallel, MOST_WARM_CONNECTIONS)
    timeout_ns = None if setup.timeout_s is None else round(setup.timeout_s * 1e9)
    return SenderSetup(str(origin_of(setup.url)), warm, setup.parallel, timeout_ns, setup.access.tls)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection: a full one stops the clock for tens of ms."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _serve_socket(sock: socket.socket) -> None:
    inbox: asyncio.Queue[FromParent | None] = asyncio.Queue()
    ended = asyncio.Event()

    def take(payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, FromParent)
        inbox.put_nowait(message)

    def end() -> None:
        inbox.put_nowait(None)
        ended.set()

    link = await FrameSocket(take, end).attach(sock)
    await serve(inbox.get, lambda message: link.send(encode(message)))
    link.close()
    await ended.wait()  # what was said has left by then


def main(argv: Sequence[str]) -> int:
    """``python -m loadgen.runs.shard FD``: started by the run's parent, with its end of a socket pair."""
    run(_serve_socket(parent_socket(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
