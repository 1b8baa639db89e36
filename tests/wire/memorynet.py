"""An event loop whose connections lead nowhere: what is written to them is kept, what they read is fed by hand.

So that a tap can be tried with millions of inputs, each cut as one likes, and the same input always does the same.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from wire.server import ClientConnection

TURNS = 12
"""Turns of the loop after which everything that follows from an input has happened; no timer is among it."""


class MemoryTransport(asyncio.Transport):
    """A connection's transport: keeps what is written, and how it was ended."""

    # A real socket whose other end stays: the tap asks it whether the peer has left.
    _socket, _peer = socket.socketpair()

    def __init__(self, protocol: asyncio.Protocol | ClientConnection) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.ended: str | None = None
        """closed, aborted, or null: open."""
        self.wrote_eof = False
        self.paused = False
        self._unread: list[bytes] = []
        protocol.connection_made(self)

    # What the test does to it.

    def feed(self, data: bytes) -> None:
        """Feed one read, once reading is not paused."""
        self._unread.append(data)
        self.deliver()

    def deliver(self) -> None:
        """Give the protocol what waits for it."""
        while self._unread and not self.paused and self.ended is None:
            self.protocol.data_received(self._unread.pop(0))

    def peer_closes(self) -> None:
        """The peer sends no more bytes."""
        if self.ended is None:
            self.protocol.eof_received()
            self.close()

    # What the protocol does to it.

    def write(self, data: Any) -> None:
        """Keep what is written."""
        if self.ended is None:
            assert not self.wrote_eof, "written behind the end"
            self.written += data

    def write_eof(self) -> None:
        """Note that no more will be."""
        self.wrote_eof = True

    def can_write_eof(self) -> bool:
        """Return True, as on TCP."""
        return True

    def close(self) -> None:
        """Close; the protocol is notified in the next loop iteration."""
        self._end("closed")

    def abort(self) -> None:
        """The same, and note that it was cut."""
        self._end("aborted")

    def is_closing(self) -> bool:
        """Return whether it has ended."""
        return self.ended is not None

    def pause_reading(self) -> None:
        """Hold back what is fed."""
        self.paused = True

    def resume_reading(self) -> None:
        """Deliver what was held back, on the loop's next turn."""
        self.paused = False
        asyncio.get_running_loop().call_soon(self.deliver)

    def get_write_buffer_size(self) -> int:
        """Nothing: its reader is never slow."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a socket for ``get_extra_info``."""
        return self._socket if name == "socket" else default

    def _end(self, how: str) -> None:
        if self.ended is None:
            self.ended = how
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class MemoryLoop(asyncio.SelectorEventLoop):
    """Connections made on it are in memory, and in ``made``, in order; what fails in a callback is in ``failures``."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[MemoryTransport] = []
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    async def create_connection(self, protocol_factory: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """A connection to nowhere."""
        transport = MemoryTransport(protocol_factory())
        self.built.append(transport)
        return transport, transport.protocol


async def pump() -> None:
    """Let everything happen that follows from what was fed."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
