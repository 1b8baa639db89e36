"""A shard as a process of this machine, over one end of a socket pair."""

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from loadgen.runs.shardmessages import Failed, FromParent, FromShard, decode, encode
from loadgen.runs.shards import ClockOffset
from loadgen.sending.child import start_child
from loadgen.sending.frames import FrameSocket

MODULE = "loadgen.runs.shard"
LEAVE_S = 5.0
"""How long a process may take to leave once it has said its last."""
REAP_POLL_S = 0.01

Hear = Callable[[FromShard], None]


class ShardProcess:
    """One shard. ``hear`` has each of its messages, and a ``Failed`` if it ended without a last word."""

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
        """Start it; it waits for its setup."""
        process, ours = start_child(module)
        shard = cls(process, hear)
        shard._socket = await FrameSocket.over(ours, shard._take, shard._end)
        return shard

    def send(self, message: FromParent) -> None:
        """Send a message; to one that is gone it is lost."""
        if self._socket is not None:
            self._socket.send(encode(message))

    async def fetch_part(self, part: Path) -> None:
        """Nothing to do: it wrote its part where it is wanted."""

    def kill(self) -> None:
        """End it at once; what it had recorded until then is in its trace."""
        self._process.kill()

    async def close(self) -> None:
        """Close its socket and wait until it has left; one that does not is killed."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        if self._reporting is not None:
            self._reporting.cancel()
        if not await self._left():
            self.kill()
            await asyncio.to_thread(self._process.wait)

    def _take(self, payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, FromShard)
        self._hear(message)

    def _end(self) -> None:
        """The socket is closed: by us, or because the process is gone."""
        if not self._closing:
            self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        await self._left()
        self._hear(Failed(f"{self.where} {how_it_ended(self._process.poll())}", is_input=False))

    async def _left(self) -> bool:
        """Wait until it has left; false: it does not."""
        for _ in range(int(LEAVE_S / REAP_POLL_S)):
            if self._process.poll() is not None:
                return True
            await asyncio.sleep(REAP_POLL_S)
        return False


def how_it_ended(code: int | None) -> str:
    """In words; null: it still runs."""
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
