"""The event loop: uvloop where there is one, a fair share of it for each connection, and hang-ups that it misses."""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # no build for this platform: the standard loop does the same, slower
    from asyncio import new_event_loop

Result = TypeVar("Result")
LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on the fastest loop at hand."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class Turns:
    """Work put off, one piece in each turn of the loop: other work waits for one piece, however many there are."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def later(self, work: Callable[[], None]) -> None:
        """Do this piece in a later turn."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._do_one)

    def _do_one(self) -> None:
        work = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._do_one)
        work()


class Hangup:
    """Asks of one connection, as long as its transport is open, if the peer has left: the loop sees only reads."""

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
