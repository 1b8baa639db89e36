"""A worker process, the data plane: accepts clients, relays, and hands copies of ended exchanges to the recorder.

A worker imports no code for prompts or pages: its memory is its connections, and its event loop only relays.
"""

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from tap.ipc.channel import Channel
from tap.ipc.exchange import Cut, Drain, Drained, Ready, Reload, WorkerSetup, encode_frame
from tap.ipc.feed import PUSH_INTERVAL_S, FeedSender, WorkerStats
from tap.ipc.upstreamboard import UpstreamBoard
from tap.ipc.workercounts import WorkerCounts
from tap.proxy.injectingrelay import new_relays
from tap.proxy.livepolicy import live_policy
from tap.proxy.recorderlink import RecorderLink
from tap.proxy.relay import Relays
from tap.proxy.sidecopy import CopyBudget
from tap.proxy.upstreams import Upstreams
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import failure_words
from wire.errors import WireError
from wire.loop import run
from wire.process import parent_socket
from wire.server import Server
from wire.tls import reload_chain, server_context

LOOP_CHECK_S = 0.1


class WorkerMeter:
    """Reads the counts of the relays and sends them to the admin process."""

    def __init__(self, socket_path: str, number: int, relays: Relays, server: Server, queue_limit_bytes: int) -> None:
        self._sender = FeedSender(socket_path)
        self._number, self._relays, self._server = number, relays, server
        self._queue_limit_bytes = queue_limit_bytes
        self._worst_delay_s = 0.0

    async def push_regularly(self) -> None:
        pushed_s = monotonic()
        while True:
            due_s = monotonic() + LOOP_CHECK_S
            await asyncio.sleep(LOOP_CHECK_S)
            now_s = monotonic()
            self._worst_delay_s = max(self._worst_delay_s, now_s - due_s)
            if now_s - pushed_s >= PUSH_INTERVAL_S:
                self._sender.offer(encode_frame(self.stats()))
                self._worst_delay_s, pushed_s = 0.0, now_s

    def stats(self) -> WorkerStats:
        relays = self._relays
        return WorkerStats(
            worker=self._number,
            pid=os.getpid(),
            in_flight=relays.in_flight,
            connections=self._server.num_connections,
            relayed=relays.relayed,
            bytes_in=relays.bytes_in,
            bytes_out=relays.bytes_out,
            queue_bytes=relays.budget.held_bytes,
            queue_limit_bytes=self._queue_limit_bytes,
            loop_delay_s=self._worst_delay_s,
            response_head=relays.response_heads,
            chunk=relays.chunks,
            upstreams=relays.upstreams.stats(),
            misrouted=dict(relays.upstreams.policy.failures),
        )


FLUSH_TIMEOUT_S = 60.0
LET_IN_S = 0.5
"""Time before a drain for accepting connections that had already come."""
READ_TURNS = 4
"""Turns of the event loop for reading from such a connection."""

_messages = msgspec.msgpack.Decoder(WorkerSetup | Reload | Drain | Cut)


class Worker:
    """A data plane, from its setup to its last response."""

    def __init__(self, setup: WorkerSetup) -> None:
        counts = WorkerCounts(Path(setup.counts_path), setup.workers)
        budget = CopyBudget(setup.queue_bytes)
        self._setup = setup
        self._upstreams = Upstreams(
            setup.upstreams,
            live_policy(setup.route, setup.number),
            route_bytes=setup.route_bytes,
            board=UpstreamBoard(Path(setup.board_path), setup.board),
            worker=setup.number,
            eject_after=setup.eject_after,
            capacity_blocks=setup.capacity_blocks,
            tls=setup.tls,
            key=HashKey(setup.key_secret),
            loras=setup.loras,
        )
        self._link = RecorderLink(setup.recorder_socket, budget, counts, setup.number)
        self._relays = new_relays(
            self._upstreams,
            self._link,
            budget,
            setup.max_body_bytes,
            setup.keep_headers,
            wanted=setup.inject,
        )
        self._server = Server(self._relays.new_relay)
        own = setup.certificate
        self._tls = None if own is None else server_context(own.cert, own.key)

    async def serve(self, channel: Channel) -> None:
        await self._server.listen_on(socket.socket(fileno=self._setup.listen_fd), self._tls)
        # All objects so far stay: a garbage collection over them would stall every stream for 40 ms.
        gc.collect()
        gc.freeze()
        meter = self._meter()
        channel.post(Ready())
        drain_s = await self._until_drain(channel)
        cut = await self._drain(channel, drain_s)
        if meter is not None:
            meter.cancel()
        self._upstreams.close()
        await self._link.finish(FLUSH_TIMEOUT_S)
        channel.post(Drained(cut))

    def _meter(self) -> "asyncio.Task[None] | None":
        path = self._setup.admin_socket
        if path is None:
            return None
        meter = WorkerMeter(path, self._setup.number, self._relays, self._server, self._setup.queue_bytes)
        return asyncio.create_task(meter.push_regularly())

    async def _until_drain(self, channel: Channel) -> float:
        while True:
            message = await channel.messages.get()
            if isinstance(message, Reload):
                self._upstreams.reload(message.upstreams)
                if message.certificate:
                    self._reload_certificate()
            elif isinstance(message, Drain):
                return message.drain_s
            elif message is None:
                return self._setup.drain_s

    def _reload_certificate(self) -> None:
        own = self._setup.certificate
        if own is not None and self._tls is not None:
            with contextlib.suppress(WireError):  # changed once more since the supervisor checked it
                reload_chain(self._tls, own.cert, own.key)

    async def _drain(self, channel: Channel, drain_s: float) -> int:
        """Let requests in flight end, for ``drain_s`` or until told to cut; return the number of cut responses."""
        await self._let_in()
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

    async def _let_in(self) -> None:
        """Accept and read connections that have already come: closing a listener resets those that wait."""
        waiting = select.poll()
        waiting.register(self._setup.listen_fd, select.POLLIN)
        until_s = time.monotonic() + LET_IN_S
        quiet_turns = 0
        while quiet_turns < READ_TURNS and time.monotonic() < until_s:
            quiet_turns = 0 if waiting.poll(0) else quiet_turns + 1
            await asyncio.sleep(0)

    def _mark_ending(self) -> None:
        self._relays.ending = True


async def _until_cut(channel: Channel) -> None:
    """Wait for a Cut. If the supervisor is gone none comes, and requests in flight have their time."""
    while True:
        message = await channel.messages.get()
        if isinstance(message, Cut):
            return
        if message is None:
            await asyncio.Event().wait()


async def work(control: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_say_failure)
    channel = await Channel(_messages).attach(control)
    setup = await channel.messages.get()
    if isinstance(setup, WorkerSetup):
        await Worker(setup).serve(channel)
    channel.close()


def _say_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report a failed callback and its place, but not its arguments, which may be a prompt."""
    error = context.get("exception")
    if error is None or isinstance(error, OSError):  # a client's handshake that failed, say
        return
    print(f"tap: a worker's callback failed ({failure_words(error)})", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(work(sock))
    except Exception as error:  # a traceback could quote a request; the supervisor notices the end
        print(f"tap: a worker process failed ({failure_words(error)})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
