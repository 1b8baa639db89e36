"""The sender's process as its shard has it: started, told what to send, and heard."""

import asyncio
import subprocess
from collections.abc import Callable
from typing import Any

from loadgen.sending.crossing import (
    Connected,
    Halt,
    Order,
    Orders,
    Pulse,
    SenderSetup,
    Unreachable,
    encode,
    from_sender,
)
from loadgen.sending.planrun import FromSender
from tracefile import InputError
from wire.process import FrameSocket, reap_child, start_child

LEAVE_S = 5.0
"""How long it may take to leave once it is told to."""


class SenderProcess:
    """A sender. ``hear`` has its messages, ``lost`` is called if it dies."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self._process, self._url = process, url
        self._socket: FrameSocket | None = None
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self.hear: Callable[[FromSender], None] = _unexpected
        self.lost: Callable[[], None] = _ignore_end

    @classmethod
    async def start(cls, setup: SenderSetup) -> "SenderProcess":
        """Start it and wait until its connections are open. Raises InputError if they cannot be opened."""
        process, sock = start_child("loadgen.sending.sender")
        sender = cls(process, setup.url)
        sender._socket = await FrameSocket.over(sock, sender._take, sender._end)
        sender._say(setup)
        try:
            await sender._connected
        except BaseException:
            await sender.close()
            raise
        return sender

    def give(self, orders: list[Order]) -> None:
        self._say(Orders(orders))

    def halt(self) -> None:
        self._say(Halt())

    async def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        await reap_child(self._process, LEAVE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _say(self, message: SenderSetup | Orders | Halt) -> None:
        if self._socket is not None:
            self._socket.send(encode(message))

    def _take(self, payload: bytes) -> None:
        message: Any = from_sender.decode(payload)
        if isinstance(message, Connected):
            self._connected.set_result(None)
        elif isinstance(message, Unreachable):
            self._connected.set_exception(
                InputError(f"--url: {self._url}: {message.kind}; expected an engine that accepts connections")
            )
        else:
            self.hear(message)

    def _end(self) -> None:
        if self._closing:
            return
        if not self._connected.done():
            self._connected.set_exception(RuntimeError("the sender process ended before its connections were open"))
        else:
            self.lost()


def _unexpected(message: FromSender) -> None:
    """Before the run it may tell how it is doing, and nothing else."""
    if isinstance(message, Pulse):
        return
    raise AssertionError(f"unexpected message: {message}")


def _ignore_end() -> None:
    """Nothing is sent yet."""
