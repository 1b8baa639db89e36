"""A worker's side of the recorder's socket: feeds it without ever waiting, and counts what it does not get.

What the recorder has not taken waits here, within the bound that all copies share. A recorder that dies takes with it
what its socket held; the rest waits for the one that follows.
"""

import asyncio
import socket
from collections import deque
from itertools import islice
from time import monotonic

from tap.ipc.exchange import encode_frame
from tap.ipc.workercounts import (
    DROP_CELLS,
    IN_FLIGHT,
    NOT_INJECTED,
    OFFERED,
    QUEUE_FULL,
    RECORDER_OFF,
    SENT,
    WorkerCounts,
)
from tap.proxy.sidecopy import CopyBudget, SideCopy
from tracefile.records.schema import Status

OUTBOX_S = 0.01
"""Exchanges leave together: to wake the recorder for each would cost more than writing it."""
RECONNECT_S = 0.2
UNCONNECTED_S = 5.0
"""How long a link that is to end waits for a recorder to come back."""
SEND_FRAMES = 64
SENDS_AT_ONCE = 2
"""A recorder that catches up on another core would take megabytes in a row, and streams would stand still meanwhile."""
FRAME_OVERHEAD_BYTES = 100


class RecorderLink:
    """Feeds whichever recorder listens at ``path``; it connects, and connects again, by itself."""

    def __init__(self, path: str, budget: CopyBudget, counts: WorkerCounts, worker: int = 0) -> None:
        self._path = path
        self._budget = budget
        self._counts = counts
        self._cells = counts.row(worker)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._outbox: deque[bytes] = deque()
        self._first_sent = 0
        """Bytes of the first frame that the socket has taken."""
        self._due: asyncio.TimerHandle | None = None
        self._writing = False
        """The socket is full; the loop says when it is not."""
        self._connected_at = monotonic()
        """When there last was a connection, or when the first was wanted."""
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._connect()

    def begin(self) -> int:
        """A request that is to be recorded has come; returns how many are now in flight, at all workers."""
        cells = self._cells
        cells[OFFERED] += 1
        cells[IN_FLIGHT] += 1
        return self._counts.in_flight()

    def count_not_injected(self) -> None:
        """A request or a response was passed by that injection was meant for."""
        self._cells[NOT_INJECTED] += 1

    def submit(self, side: SideCopy, end_ns: int, outcome: Status, error_kind: str | None) -> None:
        """Hand over a finished exchange, or count why not. Never waits, never raises."""
        cells = self._cells
        cells[IN_FLIGHT] -= 1
        if side.dropped is not None:
            cells[DROP_CELLS[side.dropped] if self._socket is not None else RECORDER_OFF] += 1
            return
        frame = encode_frame(side.finish(end_ns, outcome, error_kind))
        size = len(frame) + FRAME_OVERHEAD_BYTES
        if self._closed or (self._outbox and self._budget.held_bytes + size > self._budget.limit_bytes):
            cells[RECORDER_OFF if self._socket is None else QUEUE_FULL] += 1
            return
        self._budget.held_bytes += size
        self._outbox.append(frame)
        self._empty.clear()
        if self._due is None and not self._writing:
            self._due = self._loop.call_later(OUTBOX_S, self._send)

    async def finish(self, timeout_s: float) -> None:
        """Let the recorder take what is left, for at most ``timeout_s``, and end the connection."""
        deadline = monotonic() + timeout_s
        while not self._empty.is_set() and monotonic() < deadline:
            if self._socket is None and monotonic() - self._connected_at > UNCONNECTED_S:
                break
            if self._due is not None:
                self._send()
            try:
                async with asyncio.timeout(RECONNECT_S):
                    await self._empty.wait()
            except TimeoutError:
                continue
        self._close()

    def _send(self) -> None:
        """Write what the socket takes at once; the loop calls again for more, and relays in between."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._socket is None:
            return
        try:
            for _ in range(SENDS_AT_ONCE):
                if self._outbox:
                    first = memoryview(self._outbox[0])[self._first_sent :]
                    self._sent(self._socket.sendmsg([first, *islice(self._outbox, 1, SEND_FRAMES)]))
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect()
            return
        if not self._outbox:
            self._stop_writing()
            self._empty.set()
        elif not self._writing:
            self._writing = True
            self._loop.add_writer(self._socket, self._send)

    def _sent(self, taken: int) -> None:
        """Let go of the frames that the socket has taken whole."""
        outbox = self._outbox
        taken += self._first_sent
        while outbox and taken >= len(outbox[0]):
            frame = outbox.popleft()
            taken -= len(frame)
            self._budget.held_bytes -= len(frame) + FRAME_OVERHEAD_BYTES
            self._cells[SENT] += 1
        self._first_sent = taken

    def _connect(self) -> None:
        if self._closed:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:  # not there yet, or gone: a unix socket says so at once
            sock.close()
            self._loop.call_later(RECONNECT_S, self._connect)
            return
        self._socket = sock
        self._send()

    def _disconnect(self) -> None:
        """The recorder is gone: half a frame that it took counts for nothing, the next one gets it whole."""
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._connected_at = monotonic()
        self._first_sent = 0
        self._loop.call_later(RECONNECT_S, self._connect)

    def _stop_writing(self) -> None:
        if self._writing and self._socket is not None:
            self._loop.remove_writer(self._socket)
        self._writing = False

    def _close(self) -> None:
        self._closed = True
        self._cells[RECORDER_OFF] += len(self._outbox)
        self._budget.held_bytes -= sum(len(frame) + FRAME_OVERHEAD_BYTES for frame in self._outbox)
        self._outbox.clear()
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
