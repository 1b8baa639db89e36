"""A peer that leaves while its connection is not read: an event loop notices only what it reads."""

import asyncio
import select
import socket

LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Hangup:
    """Asks of one connection, as long as its transport is open, whether the peer has left."""

    __slots__ = ("_poll",)

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        sock: socket.socket | None = transport.get_extra_info("socket")
        self._poll: select.poll | None = None
        if sock is not None and sock.fileno() >= 0:
            self._poll = select.poll()
            self._poll.register(sock.fileno(), LEFT)

    def seen(self) -> bool:
        """Return whether the peer closed or reset it, be there unread bytes before that or not. One system call."""
        return self._poll is None or bool(self._poll.poll(0))
