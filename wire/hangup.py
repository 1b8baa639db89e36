"""A peer that leaves while nobody reads from it: an event loop notices only what it reads."""

import asyncio
import select
import socket

LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer closed or reset the connection, be there unread bytes before that or not. One system call."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), LEFT)
    return bool(poll.poll(0))
