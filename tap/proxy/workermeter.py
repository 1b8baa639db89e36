"""A worker's side of the admin process: pushes its numbers once a second. Without an admin port there is none."""

import asyncio
import os
from time import monotonic

from tap.ipc.exchange import encode_frame
from tap.ipc.feed import PUSH_INTERVAL_S, FeedSender, WorkerStats
from tap.proxy.relay import Relays
from wire.server import Server

LOOP_CHECK_S = 0.1
"""How often the event loop is asked whether it is on time."""


class WorkerMeter:
    """Reads what the relays count; the data plane does not know of it."""

    def __init__(self, socket_path: str, number: int, relays: Relays, server: Server, queue_limit_bytes: int) -> None:
        self._sender = FeedSender(socket_path)
        self._number, self._relays, self._server = number, relays, server
        self._queue_limit_bytes = queue_limit_bytes
        self._worst_delay_s = 0.0

    async def push_regularly(self) -> None:
        """Push once a second, for ever; in between, watch how late the event loop is."""
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
        """The numbers as they are."""
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
            response_head=relays.overhead.response_heads,
            chunk=relays.overhead.chunks,
        )
