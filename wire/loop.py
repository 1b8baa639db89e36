"""The event loop: uvloop where there is one, a fair share of it for each connection, and pauses of reading."""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

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


class Connection(asyncio.BaseProtocol):
    """A connection that stops reading while its receiver is slow, and for others' turns after much work at once."""

    def __init__(self, turns: Turns | None) -> None:
        """``turns``: shared with the connections among which work is divided."""
        self.transport: asyncio.Transport | None = None
        self._turns = turns or Turns()
        self._write_paused = self._read_paused = self._on_break = False
        self._hangup: select.poll | None = None

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def left(self) -> bool:
        """Return whether the peer closed or reset it, told of that by the loop, which sees only reads, or not."""
        return self.transport is None or self._hangup is None or bool(self._hangup.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            self._hangup = select.poll()
            self._hangup.register(sock.fileno(), LEFT)

    def pause_reading(self) -> None:
        """Stop reading until ``resume_reading``: the receiver is slower than the peer."""
        self._read_paused = True
        self._read_or_not()

    def resume_reading(self) -> None:
        self._read_paused = False
        self._read_or_not()

    def _take_break(self) -> None:
        """Let others have their turn before the rest."""
        self._on_break = True
        self._read_or_not()
        self._turns.later(self._end_break)

    def _end_break(self) -> None:
        self._on_break = False
        self._go_on()
        self._read_or_not()

    def _go_on(self) -> None:
        """Do what had to wait for the break's end."""

    def _read_or_not(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._read_paused or self._on_break:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
