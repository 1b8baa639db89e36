"""Shards of a run, driven by their parent: all ready, one common t = 0, all ended, also after the death of a shard."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from loadgen.runs.shardmessages import (
    Done,
    Failed,
    FromParent,
    FromShard,
    Go,
    Progress,
    Ready,
    Setup,
    Stop,
    decode,
    encode,
)
from tracefile import InputError, Meta
from wire.process import FrameSocket, child_left, reap_child, start_child

CORES_A_SHARD = 2
"""One for the shard, one for its sender."""

HEAD_START_S = 0.1
"""From ``Go`` to t = 0, in which the first requests are built."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of another machine's wall clock from this one's, and its uncertainty."""

    offset_ns: int
    round_trip_ns: int
    """Of the quickest response; the offset's error is at most half of it."""


class ShardLink(Protocol):
    """Shard on any machine."""

    where: str
    clock: ClockOffset | None
    """Null: on this machine."""

    def send(self, message: FromParent) -> None:
        """Send a message; ignored if the shard is gone."""

    async def fetch_part(self, part: Path) -> None:
        """Copy its records to ``part`` on this machine."""

    def kill(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """Place where shards run."""

    start: Callable[[Callable[[FromShard], None]], Awaitable[ShardLink]]
    """Starts a shard; the callable gets its messages."""
    cores: int
    apart: bool
    """True if shards may run on other machines, so that parts must be fetched."""


Header = Callable[[int], Meta]
"""Makes the trace's header, from t = 0 in ns since 1970."""


@dataclass(frozen=True, slots=True)
class Zero:
    """Time of t = 0."""

    at_ns: int
    """On ``perf_counter_ns``."""
    unix_ns: int


class Shards:
    """All shards of a run: ``ready``, then ``go``, then ``ended``; ``stop`` and ``kill`` at any time."""

    def __init__(self, count: int, host: Host) -> None:
        self._count = count
        self._host = host
        self._inbox: asyncio.Queue[tuple[int, FromShard]] = asyncio.Queue()
        self.links: list[ShardLink] = []
        self.stopping: str | None = None
        self.going = False
        self.meta = Meta()
        self.clocks: list[ClockOffset | None] = []

    async def __aenter__(self) -> "Shards":
        starting = [asyncio.ensure_future(self._host.start(self._hear(index))) for index in range(self._count)]
        try:
            self.links += await asyncio.gather(*starting)
        except BaseException:
            started = await asyncio.gather(*starting, return_exceptions=True)
            self.links += [link for link in started if not isinstance(link, BaseException)]
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def ready(self, setups: Sequence[Setup]) -> list[Ready]:
        for link, setup in zip(self.links, setups, strict=True):
            link.send(setup)
        found: dict[int, Ready] = {}
        while len(found) < self._count:
            index, message = await self._inbox.get()
            if isinstance(message, Failed):
                raise InputError(message.text if message.is_input else f"shard {index}: {message.text}")
            assert isinstance(message, Ready)
            found[index] = message
        return [found[index] for index in range(self._count)]

    def go(self, header: Header, from_ms: float = 0.0) -> Zero:
        """Start all shards at one t = 0, or at ``from_ms`` of an earlier run's plan."""
        head_start_ns = int(HEAD_START_S * 1e9) - round(from_ms * 1e6)
        zero = Zero(time.perf_counter_ns() + head_start_ns, time.time_ns() + head_start_ns)
        meta = header(zero.unix_ns)
        self.meta = meta
        for link in self.links:
            link.send(_go(zero, self.meta, link.clock, from_ms))
        self.clocks = [link.clock for link in self.links]
        self.going = True
        return zero

    async def ended(self, hear: Callable[[int, Progress | Done | Failed], None]) -> list[Done | Failed]:
        """Wait for all last messages; stop the others if a shard ends early. ``hear`` gets every message."""
        last_words: dict[int, Done | Failed] = {}
        while len(last_words) < self._count:
            index, message = await self._inbox.get()
            assert isinstance(message, Progress | Done | Failed)
            if index in last_words:  # a process that ends after its last word says nothing new
                continue
            hear(index, message)
            if isinstance(message, Done | Failed):
                last_words[index] = message
                self._heed(message)
        return [last_words[index] for index in range(self._count)]

    async def fetch(self, parts: Sequence[Path]) -> Meta:
        """Copy every shard's part here; return the header with the drift of other machines' clocks."""
        await asyncio.gather(*(link.fetch_part(part) for link, part in zip(self.links, parts, strict=True)))
        apart = [_clock_told(link, before) for link, before in zip(self.links, self.clocks, strict=True) if before]
        return (
            msgspec.structs.replace(self.meta, extra=self.meta.extra | {"shard_clocks": apart}) if apart else self.meta
        )

    def stop(self, reason: str) -> None:
        if self.stopping is None:
            self.stopping = reason
            for link in self.links:
                link.send(Stop(reason))

    def kill(self) -> None:
        for link in self.links:
            link.kill()

    def _hear(self, index: int) -> Callable[[FromShard], None]:
        return lambda message: self._inbox.put_nowait((index, message))

    def _heed(self, message: Done | Failed) -> None:
        if isinstance(message, Failed):
            self.stop("shard failed")
        elif message.stopped is not None:
            self.stop(message.stopped)

    async def _close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links))


def _go(zero: Zero, meta: Meta, clock: ClockOffset | None, from_ms: float) -> Go:
    """``Go`` in the times of the shard's own machine."""
    if clock is None:
        return Go(zero.at_ns, zero.unix_ns, meta, from_ms)
    assert meta.epoch_unix_ns is not None  # a header says when its zero was
    theirs = msgspec.structs.replace(meta, epoch_unix_ns=meta.epoch_unix_ns + clock.offset_ns)
    return Go(None, zero.unix_ns + clock.offset_ns, theirs, from_ms)


def _clock_told(link: ShardLink, before: ClockOffset) -> dict[str, object]:
    """For the header: another machine's clock at the start, and its drift until the end."""
    moved_ns = 0 if link.clock is None else link.clock.offset_ns - before.offset_ns
    return {
        "where": link.where,
        "offset_ms": before.offset_ns / 1e6,
        "round_trip_ms": before.round_trip_ns / 1e6,
        "moved_ms": moved_ns / 1e6,
    }


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
