"""Worker process, the data plane: accepts clients, relays requests and sends captures to the recorder.

A worker imports no tokenizer and no admin pages: its event loop only relays, so that no token waits for other work.
"""

import asyncio
import gc
import select
import signal
import socket
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from tap.ipc.messages import STATS_INTERVAL_S, Channel, Cut, Drain, Drained, Ready, Reload, WorkerSetup, WorkerStats
from tap.ipc.sharedmemory import RECORDER_SOCKET, UpstreamBoard, WorkerCounts
from tap.proxy.capture_buffer import CaptureBudget
from tap.proxy.injectingrelay import new_relays
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.routing import live_policy
from tap.proxy.upstreams import Upstreams
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import failure_words
from wire.loop import run
from wire.process import parent_socket
from wire.server import Server

LOOP_CHECK_S = 0.1


FLUSH_TIMEOUT_S = 60.0
ACCEPT_PENDING_S = 0.5
"""Longest time, before a drain, for accepting connections that are already in the backlog."""
READ_TURNS = 4
"""Event loop iterations for reading from such a connection."""

_messages = msgspec.msgpack.Decoder(WorkerSetup | Reload | Drain | Cut)


class Worker:
    """Data plane of one process, from its setup message to its last response."""

    def __init__(self, setup: WorkerSetup) -> None:
        settings = setup.settings
        self._setup, self._settings = setup, settings
        self._budget = CaptureBudget(settings.queue_bytes // settings.workers)
        self._upstreams = Upstreams(
            setup.upstreams,
            live_policy(settings.route),
            board=UpstreamBoard(setup.folder, setup.board),
            worker=setup.number,
            capacity_blocks=setup.capacity_blocks,
            tls=settings.access.tls,
            key=HashKey(setup.key_secret),
        )
        counts = WorkerCounts(setup.folder, settings.workers)
        self._link = RecorderLink(f"{setup.folder}/{RECORDER_SOCKET}", self._budget, counts, setup.number)
        self._relays = new_relays(
            *(self._upstreams, self._link, self._budget, settings.max_body_bytes, settings.keep_headers),
            requested=settings.inject,
        )
        self._server = Server(self._relays.new_relay)

    async def serve(self, channel: Channel) -> None:
        await self._server.listen_on(socket.socket(fileno=self._setup.listen_fd))
        # All objects so far stay: a garbage collection over them would add 40 ms to every stream's ITL.
        gc.collect()
        gc.freeze()
        reporting = None
        if self._settings.admin is not None:
            reporting = asyncio.create_task(self._report_regularly(channel))
        channel.post(Ready())
        drain_s = await self._until_drain(channel)
        cut = await self._drain(channel, drain_s)
        if reporting is not None:
            reporting.cancel()
        self._upstreams.close()
        await self._link.finish(FLUSH_TIMEOUT_S)
        channel.post(Drained(cut))

    async def _report_regularly(self, channel: Channel) -> None:
        reported_s, worst_delay_s = monotonic(), 0.0
        while True:
            due_s = monotonic() + LOOP_CHECK_S
            await asyncio.sleep(LOOP_CHECK_S)
            now_s = monotonic()
            worst_delay_s = max(worst_delay_s, now_s - due_s)
            if now_s - reported_s >= STATS_INTERVAL_S:
                channel.post(self.stats(worst_delay_s))
                reported_s, worst_delay_s = now_s, 0.0

    def stats(self, loop_delay_s: float) -> WorkerStats:
        relays = self._relays
        return WorkerStats(
            worker=self._setup.number,
            in_flight=relays.in_flight,
            connections=self._server.num_connections,
            relayed=relays.relayed,
            bytes_in=relays.bytes_in,
            bytes_out=relays.bytes_out,
            queue_bytes=self._budget.used_bytes,
            queue_limit_bytes=self._budget.limit_bytes,
            loop_delay_s=loop_delay_s,
            upstreams=self._upstreams.stats(),
            misrouted=dict(self._upstreams.policy.failures),
        )

    async def _until_drain(self, channel: Channel) -> float:
        while True:
            message = await channel.messages.get()
            if isinstance(message, Reload):
                self._upstreams.reload(message.upstreams)
            elif isinstance(message, Drain):
                return message.drain_s
            elif message is None:
                return self._settings.drain_s

    async def _drain(self, channel: Channel, drain_s: float) -> int:
        """Wait for requests in flight, for ``drain_s`` or until a Cut; return the number of cut responses."""
        await self._accept_pending()
        draining = asyncio.create_task(self._server.drain(drain_s))
        cutting = asyncio.create_task(_until_cut(channel))
        timer = asyncio.get_running_loop().call_later(drain_s, self._mark_ending)
        await asyncio.wait([draining, cutting], return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        cutting.cancel()
        if not draining.done():
            draining.cancel()
            self._mark_ending()
            draining = asyncio.create_task(self._server.drain(0))
        return await draining

    async def _accept_pending(self) -> None:
        """Accept and read connections of the backlog: closing the listener would reset them."""
        waiting = select.poll()
        waiting.register(self._setup.listen_fd, select.POLLIN)
        until_s = monotonic() + ACCEPT_PENDING_S
        quiet_turns = 0
        while quiet_turns < READ_TURNS and monotonic() < until_s:
            quiet_turns = 0 if waiting.poll(0) else quiet_turns + 1
            await asyncio.sleep(0)

    def _mark_ending(self) -> None:
        self._relays.ending = True


async def _until_cut(channel: Channel) -> None:
    """Wait for a Cut. Without a supervisor no Cut arrives, and requests in flight get the full drain time."""
    while True:
        message = await channel.messages.get()
        if isinstance(message, Cut):
            return
        if message is None:
            await asyncio.Event().wait()


async def work(control: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_log_failure)
    channel = await Channel(_messages).attach(control)
    setup = await channel.messages.get()
    if isinstance(setup, WorkerSetup):
        await Worker(setup).serve(channel)
    channel.close()


def _log_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print a failed callback with its source line, but without its arguments, which may hold a prompt."""
    error = context.get("exception")
    if error is None or isinstance(error, OSError):  # such as a client's failed TLS handshake
        return
    print(f"tap: a worker's callback failed ({failure_words(error)})", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(work(sock))
    except Exception as error:  # a traceback could quote a prompt; the supervisor restarts the process
        print(f"tap: a worker process failed ({failure_words(error)})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
