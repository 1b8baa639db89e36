"""Connection of a worker to the recorder: never blocks the relay, and counts exchanges that are dropped.

If the recorder dies, the content of its socket is lost; the outbox waits for the next recorder, within the memory
budget of the captures.
"""

import asyncio
import socket
from collections import deque
from itertools import islice
from time import monotonic

from tap.ipc.messages import encode_frame
from tap.ipc.sharedmemory import (
    DROP_CELLS,
    IN_FLIGHT,
    NOT_INJECTED,
    OFFERED,
    QUEUE_FULL,
    RECORDER_OFF,
    SENT,
    UNRECORDED,
    WorkerCounts,
)
from tap.proxy.capture_buffer import CaptureBudget, CaptureBuffer
from tracefile.records.schema import Status

OUTBOX_S = 0.01
"""Batching interval: waking the recorder for each exchange would cost more than the write."""
RECONNECT_S = 0.2
UNCONNECTED_S = 5.0
"""Longest wait of ``finish`` for a recorder."""
SEND_FRAMES = 64
SENDS_AT_ONCE = 2
"""Sends in a row: a recorder that catches up on another core would read megabytes, and streamed tokens would wait."""
FRAME_OVERHEAD_BYTES = 100


class RecorderLink:
    """Connection to the recorder that listens at ``path``; reconnects automatically."""

    def __init__(self, path: str, budget: CaptureBudget, counts: WorkerCounts, worker: int = 0) -> None:
        self._path = path
        self._budget = budget
        self._counts = counts
        self._cells = counts.row(worker)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._outbox: deque[bytes] = deque()
        self._first_sent = 0
        """Bytes of the first frame that are already sent."""
        self._due: asyncio.TimerHandle | None = None
        self._writing = False
        """True: the socket buffer is full, and the loop calls when it is writable."""
        self._connected_at = monotonic()
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._connect()

    def begin(self) -> int:
        cells = self._cells
        cells[OFFERED] += 1
        cells[IN_FLIGHT] += 1
        return self._counts.in_flight()

    def count_not_injected(self) -> None:
        self._cells[NOT_INJECTED] += 1

    def count_unrecorded(self) -> None:
        self._cells[UNRECORDED] += 1

    def submit(self, capture: CaptureBuffer, end_ns: int, outcome: Status, error_kind: str | None) -> None:
        """Queue a finished exchange for the recorder, or count it as dropped. Never blocks, never raises."""
        cells = self._cells
        cells[IN_FLIGHT] -= 1
        if capture.dropped is not None:
            cells[DROP_CELLS[capture.dropped] if self._socket is not None else RECORDER_OFF] += 1
            return
        frame = encode_frame(capture.finish(end_ns, outcome, error_kind))
        size = len(frame) + FRAME_OVERHEAD_BYTES
        if self._closed or (self._outbox and self._budget.used_bytes + size > self._budget.limit_bytes):
            cells[RECORDER_OFF if self._socket is None else QUEUE_FULL] += 1
            return
        self._budget.used_bytes += size
        self._outbox.append(frame)
        self._empty.clear()
        if self._due is None and not self._writing:
            self._due = self._loop.call_later(OUTBOX_S, self._send)

    async def finish(self, timeout_s: float) -> None:
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
        """Write what the socket accepts; the loop calls again for more, and relays tokens in between."""
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

    def _sent(self, sent_bytes: int) -> None:
        outbox = self._outbox
        sent_bytes += self._first_sent
        while outbox and sent_bytes >= len(outbox[0]):
            frame = outbox.popleft()
            sent_bytes -= len(frame)
            self._budget.used_bytes -= len(frame) + FRAME_OVERHEAD_BYTES
            self._cells[SENT] += 1
        self._first_sent = sent_bytes

    def _connect(self) -> None:
        if self._closed:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:  # no recorder listens: connecting to a unix socket fails at once
            sock.close()
            self._loop.call_later(RECONNECT_S, self._connect)
            return
        self._socket = sock
        self._send()

    def _disconnect(self) -> None:
        """Close after the recorder's end; a partly sent frame is sent again in full to the next recorder."""
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
        self._budget.used_bytes -= sum(len(frame) + FRAME_OVERHEAD_BYTES for frame in self._outbox)
        self._outbox.clear()
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
