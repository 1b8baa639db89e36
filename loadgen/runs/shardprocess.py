"""A shard as a process of this machine, over one end of a socket pair."""

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from loadgen.runs.shardmessages import Failed, FromParent, FromShard, decode, encode
from loadgen.runs.shards import ClockOffset
from wire.process import FrameSocket, child_left, reap_child, start_child

MODULE = "loadgen.runs.shard"
LEAVE_S = 5.0
"""Longest time to end after the last message."""

Hear = Callable[[FromShard], None]


class ShardProcess:
    """Shard process. ``hear`` gets its messages, and a ``Failed`` if it ended without a last message."""

    clock: ClockOffset | None = None

    def __init__(self, process: "subprocess.Popen[bytes]", hear: Hear) -> None:
        self.where = f"process {process.pid}"
        self._process = process
        self._hear = hear
        self._socket: FrameSocket | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def start(cls, hear: Hear, module: str = MODULE) -> "ShardProcess":
        process, ours = start_child(module)
        shard = cls(process, hear)
        shard._socket = await FrameSocket(shard._take, shard._end).attach(ours)
        return shard

    def send(self, message: FromParent) -> None:
        if self._socket is not None:
            self._socket.send(encode(message))

    async def fetch_part(self, part: Path) -> None:
        """Nothing to do: the part is on this machine."""

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        if self._reporting is not None:
            self._reporting.cancel()
        await reap_child(self._process, LEAVE_S)

    def _take(self, payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, FromShard)
        self._hear(message)

    def _end(self) -> None:
        if not self._closing:
            self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        await child_left(self._process, LEAVE_S)
        self._hear(Failed(f"{self.where} {how_it_ended(self._process.poll())}", is_input=False))


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
