"""Worker: sends one shard of a run's sessions and records them, in a local process or on another machine."""

import asyncio
import contextlib
import gc
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.core.bodies import prepare_tables
from loadgen.core.job import OpenJob
from loadgen.core.request import RequestWriter, origin_of
from loadgen.runs.messages import (
    Done,
    Failed,
    FromParent,
    FromWorker,
    Go,
    Progress,
    Ready,
    Setup,
    Stop,
    decode,
    encode,
)
from loadgen.sending.planrun import PlanRun
from loadgen.sending.sender import Connections
from measure.metrics.client import with_delays
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError, failure_words
from wire.client.pool import ConnectError, ConnectionPool
from wire.loop import run
from wire.process import FrameSocket, parent_socket

WARM_CONNECTIONS = 16
"""Connections opened before the first request without a limit; more are opened as needed."""
MOST_WARM_CONNECTIONS = 256
PROGRESS_INTERVAL_S = 0.25

Inbox = asyncio.Queue[FromParent | None]
"""The parent's messages; null: the parent is gone."""
Send = Callable[[FromWorker], None]


async def serve(inbox: Inbox, send: Send) -> None:
    """Run one shard; the last message is ``Done`` or ``Failed``, unless ``Go`` never came."""
    try:
        setup = await inbox.get()
        if isinstance(setup, Setup):
            await _serve(setup, inbox, send)
    except InputError as error:
        send(Failed(str(error), is_input=True))
    except Exception as error:  # any error: the parent must not wait forever
        traceback.print_tb(error.__traceback__)
        text = failure_words(error)
        print(text, file=sys.stderr)
        send(Failed(text, is_input=False))


async def _serve(setup: Setup, inbox: Inbox, send: Send) -> None:
    prepare_tables()
    opened = setup.job.open(setup.shard)
    ready = Ready(opened.digest_share(), opened.planned(), opened.last_send_ms())
    settings, limit = setup.settings, setup.parallel
    pool = ConnectionPool(origin_of(settings.url), tls=settings.access.tls)
    connections = Connections(pool, limit)
    try:
        await connections.warm(WARM_CONNECTIONS if limit is None else min(limit, MOST_WARM_CONNECTIONS))
        send(ready)
        go = await inbox.get()
        if isinstance(go, Go):
            send(await _run(setup, go, opened, connections, Parent(inbox, send)))
    except ConnectError as error:
        raise InputError(f"--url: {settings.url}: {error.reason}") from None
    finally:
        connections.close()
        await asyncio.sleep(0)  # lets the transports close


@dataclass(frozen=True, slots=True)
class Parent:
    """Both directions of the channel to the parent."""

    inbox: Inbox
    send: Send


async def _run(setup: Setup, go: Go, opened: OpenJob, connections: Connections, parent: Parent) -> Done:
    t0_ns = time.perf_counter_ns() + go.t0_unix_ns - time.time_ns() if go.t0_ns is None else go.t0_ns
    settings, cpu_before_s = setup.settings, time.process_time()
    with collector_off(), TraceWriter(setup.trace, go.meta, overwrite=setup.overwrite) as trace:
        running = PlanRun(
            opened.plan(),
            connections,
            RequestWriter(origin_of(settings.url), settings.access.headers),
            trace.write,
            t0_ns=t0_ns,
            parallel=setup.parallel,
            timeout_s=settings.timeout_s,
        )
        asyncio.get_running_loop().set_exception_handler(_failing(running))
        running.start()
        tasks = [asyncio.create_task(work) for work in (_listen(parent.inbox, running), _report(running, parent.send))]
        try:
            await running.over
        finally:
            for task in tasks:
                task.cancel()
            running.close()
            trace.change_meta(with_delays(go.meta, running.loop_delay_ms, running.follow_up_delay_ms))
    return Done(
        tally=running.count(),
        findings=opened.findings(),
        reason=running.reason,
        stopped=running.stopped,
        seconds=max(0, running.last_end_ns - t0_ns) / 1e9,
        cpu_s=time.process_time() - cpu_before_s,
        loop_delay_ms=running.loop_delay_ms,
        follow_up_delay_ms=running.follow_up_delay_ms,
    )


def _failing(running: PlanRun) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """End the run with the error of a connection's callback: its request would never end."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            running.fail(error)

    return handle


async def _listen(inbox: Inbox, running: PlanRun) -> None:
    while (message := await inbox.get()) is not None:
        if isinstance(message, Stop):
            running.stop(message.reason)
    running.stop("parent gone")


async def _report(running: PlanRun, send: Send) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        tally = running.count()
        send(Progress(tally.counts(), tally.pop_recent()))


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection: a full collection stops the time stamps of tokens for tens of ms."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _serve_socket(sock: socket.socket) -> None:
    inbox: Inbox = asyncio.Queue()
    ended = asyncio.Event()

    def receive(payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, FromParent)
        inbox.put_nowait(message)

    def end() -> None:
        inbox.put_nowait(None)
        ended.set()

    link = await FrameSocket(receive, end).attach(sock)
    await serve(inbox, lambda message: link.send(encode(message)))
    link.close()
    await ended.wait()  # until then, all messages have left


def main(argv: Sequence[str]) -> int:
    """``python -m loadgen.runs.worker FD``: started by the run's parent, with its end of a socket pair."""
    run(_serve_socket(parent_socket(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
