"""A shard on another machine: a Ray actor that starts the shard's process there and passes its messages on.

So the shard is the same program with the same messages as on this machine; Ray carries them and starts it.
"""

import asyncio
import importlib.metadata
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from loadgen.runs.shardmessages import FromParent, FromShard, Setup
from loadgen.runs.shardprocess import ShardProcess

PART = "part.jsonl"


class ShardActor:
    """One shard's process and its part of the trace, which lies here until it is fetched."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtape-shard-")
        self._said: asyncio.Queue[FromShard] = asyncio.Queue()
        self._shard: ShardProcess | None = None

    async def start(self) -> tuple[str, str]:
        """Start the process; returns where it runs, and the version of this program there."""
        self._shard = await ShardProcess.start(self._said.put_nowait)
        return f"{platform.node()}, {self._shard.where}", version()

    async def clock(self) -> int:
        """This machine's wall clock, ns since 1970."""
        return time.time_ns()

    async def send(self, message: FromParent) -> None:
        """Pass a message on to the shard; what it writes, it writes here."""
        assert self._shard is not None  # started first
        if isinstance(message, Setup):
            message = replace(message, trace=self._part(), overwrite=True)
        self._shard.send(message)

    async def hear(self) -> list[FromShard]:
        """What the shard has said since the last call, as soon as that is anything."""
        messages = [await self._said.get()]
        while not self._said.empty():
            messages.append(self._said.get_nowait())
        return messages

    async def read(self, offset: int, size: int) -> bytes:
        """A piece of the part; empty behind its end, or if there is no part."""
        if not self._part().exists():
            return b""
        with self._part().open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    async def kill(self) -> None:
        """End the shard at once."""
        if self._shard is not None:
            self._shard.kill()

    async def close(self) -> None:
        """Let the shard go, and forget its part."""
        if self._shard is not None:
            await self._shard.close()
        self._folder.cleanup()

    def _part(self) -> Path:
        return Path(self._folder.name) / PART


def version() -> str:
    """This program's version."""
    return importlib.metadata.version("kvtape")
