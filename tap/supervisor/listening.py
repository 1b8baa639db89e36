"""Listening sockets, bound before all else: an address that cannot be had is said before a trace is begun."""

import socket

from tracefile.records.errors import InputError

BACKLOG = 1024


def bind_listeners(flag: str, host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Sockets that share an address, each for a process of its own. Raises InputError if it cannot be had.

    The kernel spreads connections over them. A process that dies loses none of those that wait at its socket, which
    stays open here for the one that follows. Port 0 becomes a free one, the same for all.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        first = _bind(family, address, share=False)
        if count == 1:
            sockets = [first]
        else:
            # Bound alone to learn that nobody else is there: who shares a port shares it with all its user's processes.
            with first:
                address = first.getsockname()
            sockets = [_bind(family, address, share=True) for _ in range(count)]
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError as error:
        raise InputError(
            f"{flag} {host}:{port}: {error.strerror or error}; expected a free address of this machine"
        ) from None
    return sockets


def _bind(family: int, address: tuple[object, ...], *, share: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
