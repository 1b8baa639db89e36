"""Sockets of the recorder, from the supervisor and from each worker, read in turn."""

import contextlib
import os
import selectors
import socket
from collections.abc import Iterator

from wire.process import split_frames

READ_BYTES = 1 << 20
"""Most bytes read from a worker before the others have their turn."""
BACKLOG = 128


class Inbox:
    """Frames from the supervisor and all workers. Frames that a worker wrote are read even if both are gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._listener: socket.socket | None = None
        self._buffers: dict[socket.socket, bytearray] = {control: bytearray()}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def listen(self, path: str) -> None:
        """Let workers connect to a unix socket at ``path``; replace that of an earlier recorder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def batches(self, idle_s: float) -> Iterator[list[bytes]]:
        """Yield the payloads that each read completes; none if nothing came for ``idle_s``.

        Ends when the supervisor has closed its side and no worker is left.
        """
        while self._control in self._buffers or self._workers_left():
            ready = self._selector.select(idle_s)
            if not ready:
                yield []
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    yield self._read(key.fileobj)

    def _workers_left(self) -> bool:
        """Return whether a worker is connected or waits to be accepted."""
        self._accept()
        return bool(self._buffers)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                worker, _ = self._listener.accept()
                self._buffers[worker] = bytearray()
                self._selector.register(worker, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> list[bytes]:
        """Return the frames that one read completes; at the end close the socket and drop an incomplete frame."""
        try:
            data = sock.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            del self._buffers[sock]
            if sock is not self._control:
                sock.close()
            return []
        buffer = self._buffers[sock]
        buffer += data
        return split_frames(buffer)
