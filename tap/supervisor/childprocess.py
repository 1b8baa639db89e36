"""A child of the tap, given its setup over a socket pair, so no secret is on its command line; it leaves at its end."""

import asyncio
import subprocess
from collections.abc import Sequence
from typing import Any

import msgspec

from tap.ipc.channel import Channel
from tap.ipc.exchange import Ready, Refused
from tracefile.records.errors import InputError
from wire.process import reap_child, start_child

START_TIMEOUT_S = 120.0


class ChildProcess:
    """A started process and the channel to it; the channel ends when the process does."""

    def __init__(self, module: str, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self._name = module.rpartition(".")[2]
        self._process, self.channel = process, channel
        self.pid = process.pid

    @classmethod
    async def start(
        cls, module: str, setup: msgspec.Struct, replies: "msgspec.msgpack.Decoder[Any]", pass_fds: Sequence[int] = ()
    ) -> "ChildProcess":
        process, ours = start_child(module, pass_fds)
        child = cls(module, process, await Channel.over(ours, replies))
        child.channel.send(setup)
        return child

    async def ready(self) -> None:
        """Wait for its first reply. Raises InputError if it refuses, ends instead, or takes too long."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self.channel.messages.get()
        except TimeoutError:
            self.kill()
            raise InputError(f"the {self._name} process is not ready after {START_TIMEOUT_S:.0f} s") from None
        if isinstance(reply, Refused):
            raise InputError(reply.reason)
        if not isinstance(reply, Ready):
            raise InputError(f"the {self._name} process ended before it was ready")

    def kill(self) -> None:
        self._process.kill()

    async def ended(self, timeout_s: float) -> None:
        await reap_child(self._process, timeout_s)
