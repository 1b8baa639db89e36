"""Event loop: uvloop if available, fair scheduling of connections, and paused reading."""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

try:
    from uvloop import new_event_loop
except ImportError:  # no build for this platform: the standard loop is slower
    from asyncio import new_event_loop

Result = TypeVar("Result")
HANGUP_EVENTS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the fastest available loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class Turns:
    """Queue of deferred work, one item per loop iteration: tokens of other connections wait for one item only."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def later(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a later loop iteration."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run_next)

    def _run_next(self) -> None:
        work = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run_next)
        work()


class Connection(asyncio.BaseProtocol):
    """Connection that pauses reading while its receiver is slow, and yields its turn after many chunks."""

    def __init__(self, turns: Turns | None) -> None:
        """``turns``: shared by the connections that yield to each other."""
        self.transport: asyncio.Transport | None = None
        self._turns = turns or Turns()
        self._write_paused = self._read_paused = self._yielded = False
        self._hangup: select.poll | None = None

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def peer_closed(self) -> bool:
        """True if the peer closed or reset the connection, also while reading is paused."""
        return self.transport is None or self._hangup is None or bool(self._hangup.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            self._hangup = select.poll()
            self._hangup.register(sock.fileno(), HANGUP_EVENTS)

    def pause_reading(self) -> None:
        """Pause reading until ``resume_reading``: the receiver is slower than the peer."""
        self._read_paused = True
        self._read_or_not()

    def resume_reading(self) -> None:
        self._read_paused = False
        self._read_or_not()

    def _yield_turn(self) -> None:
        """Yield to other connections before parsing the remaining bytes."""
        self._yielded = True
        self._read_or_not()
        self._turns.later(self._resume_turn)

    def _resume_turn(self) -> None:
        self._yielded = False
        self._continue()
        self._read_or_not()

    def _continue(self) -> None:
        """Continue parsing after the yielded turn."""

    def _read_or_not(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._read_paused or self._yielded:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
