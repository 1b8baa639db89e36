"""A child process, started again when it ends unasked, after a wait that grows while it keeps ending.

Its setup comes over a socket pair, so no secret is on its command line or in its environment.
"""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

import msgspec

from tap.ipc.channel import Channel
from tap.ipc.exchange import Ready, Refused
from tap.ipc.stderr import say
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
        process, ours = start_child(module, pass_fds, own_session=False)  # the recorder's priority counts
        child = cls(module, process, await Channel(replies).attach(ours))
        child.channel.post(setup)
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


BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
"""After a life this long, an end counts as the first."""
REAP_S = 2.0


def ignore(_: Any = None) -> None:
    """Do nothing with a message."""


class RestartingChild:
    """A child that is kept running."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        *,
        on_message: Callable[[Any], None] = ignore,
        on_death: Callable[[], None] = ignore,
        consequence: str,
    ) -> None:
        """``on_death`` is called when the child has ended unasked, before it is started again.

        ``consequence``: the effect until it is back, for the line on stderr.
        """
        self.name = name
        self._start, self._on_message, self._on_death = start, on_message, on_death
        self._consequence = consequence
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._deaths = 0
        """Ends in a row, none after a long life."""
        self._started_at = 0.0
        self._finishing = False
        self._launching = False
        self.ready = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child and keep it running. Raises InputError if it refuses its setup."""
        await self._launch()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, message: Any) -> None:
        """Send a message; a child that is away misses it, and learns its content from its next setup."""
        if self._child is not None:
            self._child.channel.post(message)

    def offer(self, message: Any) -> None:
        """Send a message that the next one repeats; a child that does not read is spared it."""
        if self._child is not None and not self._child.channel.congested:
            self._child.channel.post(message)

    async def finish(self, timeout_s: float) -> bool:
        if self._child is not None:
            self._child.channel.finish()
        return await self.left(timeout_s)

    async def left(self, timeout_s: float) -> bool:
        self._finishing = True
        if self._task is None:
            return True
        if self._child is None and not self._launching:
            self._task.cancel()
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done and self._child is not None:
            self._child.kill()
            await asyncio.wait([self._task], timeout=REAP_S)
        return bool(done)

    async def _launch(self) -> None:
        self._started_at, self._launching = monotonic(), True
        try:
            child = await self._start()
            try:
                await child.ready()
            except BaseException:
                child.channel.close()
                await child.ended(REAP_S)
                raise
        finally:
            self._launching = False
        self._child, self.ready = child, True
        if self._finishing:  # ready too late for ``finish``, and perhaps with work to account for
            child.channel.finish()

    async def _keep(self) -> None:
        while self._child is not None:
            while (message := await self._child.channel.messages.get()) is not None:
                self._on_message(message)
            child, self._child, self.ready = self._child, None, False
            await child.ended(REAP_S)
            if self._finishing:
                return
            self._on_death()
            await self._start_again()

    async def _start_again(self) -> None:
        cause = "died"
        while self._child is None and not self._finishing:
            long_lived = monotonic() - self._started_at > LONG_LIFE_S
            self._deaths = 0 if long_lived else self._deaths + 1
            wait_s = backoff_s(self._deaths)
            say(f"the {self.name} process {cause}; {self._consequence}; started again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            if self._finishing:
                return
            try:
                await self._launch()
            except InputError as error:
                cause = f"cannot be started ({error})"
            else:
                self.restarts += 1
                say(f"the {self.name} process is back")


def backoff_s(deaths: int) -> float:
    return min(BACKOFF_S * 2.0 ** (deaths - 1), MAX_BACKOFF_S) if deaths else 0.0
