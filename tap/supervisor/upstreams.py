"""Upstreams of the supervisor: wait for the first connection, slots in shared memory, dialects."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from time import monotonic

import msgspec

from engines.detection import DIALECTS
from engines.dialect import DialectName
from tap.ipc.answer import Answer
from tap.ipc.messages import UpstreamEntry, log_line
from tap.ipc.settings import Settings, read_upstreams
from tracefile.records.errors import InputError
from wire.client.pool import ConnectError, ConnectionPool
from wire.head import RequestHead
from wire.server import ClientConnection, Server
from wire.tls import Tls
from wire.url import Origin


class Fleet:
    """Upstreams of a tap with their slots (load cells, prefix table) and dialects."""

    def __init__(self, origins: Sequence[Origin], slots: int, dialect: DialectName | None = None) -> None:
        """``slots``: largest number of upstreams, by the size of the shared memory.

        ``dialect``: of all upstreams. None: detected for each upstream.
        """
        self._num_slots, self._dialect = slots, dialect
        self._dialects: dict[Origin, DialectName] = {}
        self.origins: tuple[Origin, ...] = ()
        self._slots: dict[Origin, int] = {}
        """Slot of each upstream; removed upstreams keep their slot until it is reused."""
        self.reload(origins)

    def reload(self, origins: Sequence[Origin]) -> None:
        """Replace the upstreams. Raises InputError if there are more upstreams than slots."""
        if len(origins) > self._num_slots:
            raise InputError(f"{len(origins)} upstreams; expected at most {self._num_slots}, or a restart of the tap")
        self.origins = tuple(origins)
        for origin in origins:
            self._slots[origin] = self._slot(origin)

    def set_dialect(self, origin: Origin, dialect: DialectName | None) -> bool:
        """Set the detected dialect of an upstream, None if unknown; return True if the dialect changed."""
        if dialect is None or self._dialect is not None or self._dialects.get(origin) == dialect:
            return False
        self._dialects[origin] = dialect
        return True

    def entries(self) -> list[UpstreamEntry]:
        return [UpstreamEntry(str(origin), self._slots[origin], self._injectable(origin)) for origin in self.origins]

    def _injectable(self, origin: Origin) -> DialectName | None:
        """Return the upstream's dialect if it supports injection of usage or token ids, else None."""
        dialect = self._dialect or self._dialects.get(origin)
        return dialect if dialect is not None and DIALECTS[dialect].injectable else None

    def _slot(self, origin: Origin) -> int:
        if origin in self._slots:
            return self._slots[origin]
        free_slots = sorted(set(range(self._num_slots)) - set(self._slots.values()))
        if free_slots:
            return free_slots[0]
        removed = next(origin for origin in self._slots if origin not in self.origins)
        return self._slots.pop(removed)


RETRY_S = 0.25
REPEAT_S = 60.0
RETRY_AFTER_S = 5
"""Retry-After of 503 responses; an engine loads for minutes."""
LEAVE_S = 1.0
REFUSAL = b'{"error": {"message": "tap: no upstream accepts connections yet", "type": "proxy_error", "code": 503}}'


async def reach_upstreams(
    settings: Settings, reloads: "asyncio.Queue[None]", listeners: Sequence[socket.socket]
) -> tuple[Settings, list[Origin]]:
    """Wait until an upstream accepts a connection; clients get 503 meanwhile.

    Return the settings, with reloaded upstreams after a SIGHUP, and the reachable upstreams. Raises InputError if TLS
    fails with all upstreams: retries do not repair certificates.
    """
    reported_s = monotonic()
    reported = None
    async with contextlib.AsyncExitStack() as stack:
        while True:
            attempts = await try_upstreams(settings.upstreams, settings.access.tls)
            if reached := [origin for origin, failure in attempts if failure is None]:
                return settings, reached
            sentence = "; ".join(f"{origin}: {failure.reason}" for origin, failure in attempts if failure is not None)
            if {failure.kind for _, failure in attempts if failure is not None} == {"tls_failed"}:
                raise InputError(f"--upstream {sentence}")
            if reported is None:
                await stack.enter_async_context(_refusing(listeners))
            if reported != sentence or monotonic() - reported_s >= REPEAT_S:
                reported, reported_s = sentence, monotonic()
                log_line(f"upstream {sentence}; CLIENTS GET 503 until it can be reached")
            await asyncio.sleep(RETRY_S)
            if settings.upstreams_file is not None and not reloads.empty():
                reloads.get_nowait()
                settings = _with_upstreams_of_file(settings, settings.upstreams_file)


def _with_upstreams_of_file(settings: Settings, file: str) -> Settings:
    try:
        return msgspec.structs.replace(settings, upstreams=read_upstreams(file))
    except InputError as error:
        log_line(f"SIGHUP: {error}; THE UPSTREAMS DO NOT CHANGE")
        return settings


@contextlib.asynccontextmanager
async def _refusing(listeners: Sequence[socket.socket]) -> AsyncIterator[None]:
    servers = [Server(_refuse) for _ in listeners]
    for server, listener in zip(servers, listeners, strict=True):
        await server.listen_on(listener.dup())
    try:
        yield
    finally:
        await asyncio.gather(*(server.drain(LEAVE_S) for server in servers))


def _refuse(head: RequestHead, client: ClientConnection) -> Answer:
    headers = [(b"Content-Type", b"application/json"), (b"Retry-After", b"%d" % RETRY_AFTER_S)]
    return Answer(head, client, b"503 Service Unavailable", headers, REFUSAL)


async def try_upstreams(origins: Sequence[Origin], tls: Tls) -> list[tuple[Origin, ConnectError | None]]:
    """Return each upstream with its connection error; None: connected."""
    failures = await asyncio.gather(*(_connect_error(origin, tls) for origin in origins))
    return list(zip(origins, failures, strict=True))


async def _connect_error(origin: Origin, tls: Tls) -> ConnectError | None:
    try:
        (await ConnectionPool(origin, tls=tls).connect()).abort()
    except ConnectError as error:
        return error
    return None
