"""The time before the first upstream is there: clients get 503, probes are told, SIGHUP reads the upstreams again.

The tap's own processes are not up yet: they start with the facts of an engine, such as its block size.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from time import monotonic

from tap.ipc.stderr import say
from tap.supervisor.config import TapConfig
from tap.supervisor.signals import Signals
from tap.supervisor.upstreamlist import read_upstreams
from tracefile.records.errors import InputError
from wire.client.pool import ConnectError, ConnectionPool
from wire.head import serialise_head
from wire.requesthead import RequestHead
from wire.server import ClientConnection, Server
from wire.tls import Tls, server_context
from wire.url import Origin

RETRY_S = 0.25
REPEAT_S = 60.0
RETRY_AFTER_S = 5
"""For clients that send a request again; an engine loads for minutes."""
LEAVE_S = 1.0
REASON = "no upstream takes connections yet"
UNREADY = b'{"ready": false, "reasons": ["%b"], "not_recording": ["%b"]}' % (REASON.encode(), REASON.encode())
REFUSAL = b'{"error": {"message": "tap: %b", "type": "proxy_error", "code": 503}}' % REASON.encode()
JSON = b"application/json"
PAGES = {
    b"/healthz": (b"200 OK", JSON, b'{"status": "ok"}'),
    b"/readyz": (b"503 Service Unavailable", JSON, UNREADY),
    b"/metrics": (b"200 OK", b"text/plain; version=0.0.4", b"kvtape_tap_ready 0.0\nkvtape_tap_recording 0.0\n"),
}
UNAVAILABLE = (b"503 Service Unavailable", JSON, REFUSAL)


async def reach_upstreams(
    config: TapConfig, signals: Signals, listeners: Sequence[socket.socket], pages: Sequence[socket.socket]
) -> tuple[TapConfig, list[Origin]]:
    """Wait until an upstream accepts a connection; return the settings, after any SIGHUP, and the upstreams reached.

    Raises InputError once ``--wait`` is over, or if TLS fails with all upstreams: time mends no certificate.
    """
    began_s = told_s = monotonic()
    told = None
    async with contextlib.AsyncExitStack() as room:
        while True:
            failures = await asyncio.gather(
                *(_failure_to_reach(origin, config.access.tls) for origin in config.upstreams)
            )
            pairs = list(zip(config.upstreams, failures, strict=True))
            if reached := [origin for origin, failure in pairs if failure is None]:
                return config, reached
            sentence = "; ".join(f"{origin}: {failure.reason}" for origin, failure in pairs if failure is not None)
            waited_s = monotonic() - began_s
            kinds = {failure.kind for failure in failures if failure is not None}
            if kinds == {"tls_failed"} or (config.wait_s is not None and waited_s >= config.wait_s):
                raise InputError(f"--upstream {sentence}")
            if told is None:
                await room.enter_async_context(_waiting_room(listeners, pages, _context(config)))
            if told != sentence or monotonic() - told_s >= REPEAT_S:
                told, told_s = sentence, monotonic()
                say(f"upstream {sentence}; CLIENTS GET 503 until it can be reached")
            await asyncio.sleep(RETRY_S)
            config = _reloaded(config, signals)


@contextlib.asynccontextmanager
async def _waiting_room(
    listeners: Sequence[socket.socket], pages: Sequence[socket.socket], tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    servers = []
    for sockets, handler, context in ((listeners, _Refused, tls), (pages, _Told, None)):
        for listener in sockets:
            servers.append(Server(handler))
            await servers[-1].listen_on(listener.dup(), context)
    try:
        yield
    finally:
        await asyncio.gather(*(server.drain(LEAVE_S) for server in servers))


def _context(config: TapConfig) -> ssl.SSLContext | None:
    own = config.certificate
    return None if own is None else server_context(own.cert, own.key)


class _Refused:
    """Handler of a request that is answered, and its connection closed, as soon as its head is there."""

    def __init__(self, head: RequestHead, client: ClientConnection) -> None:
        status, kind, body = self.response(head)
        headers = [(b"Content-Type", kind), (b"Content-Length", b"%d" % len(body))]
        if status.startswith(b"503"):
            headers.append((b"Retry-After", b"%d" % RETRY_AFTER_S))
        client.write(serialise_head(b"HTTP/1.1 %b" % status, [*headers, (b"Connection", b"close")]))
        if head.method != b"HEAD":
            client.write(body)
        client.finish(keep_alive=False)

    def response(self, head: RequestHead) -> tuple[bytes, bytes, bytes]:
        return UNAVAILABLE

    def request_body(self, raw: bytes, data: bytes) -> None: ...

    def request_end(self) -> None: ...

    def client_gone(self) -> None: ...

    def pause_response(self) -> None: ...

    def resume_response(self) -> None: ...


class _Told(_Refused):
    """Handler of a request to the admin port."""

    def response(self, head: RequestHead) -> tuple[bytes, bytes, bytes]:
        return PAGES.get(head.target.partition(b"?")[0], UNAVAILABLE)


async def _failure_to_reach(origin: Origin, tls: Tls) -> ConnectError | None:
    try:
        (await ConnectionPool(origin, tls=tls).connect()).abort()
    except ConnectError as error:
        return error
    return None


def _reloaded(config: TapConfig, signals: Signals) -> TapConfig:
    """Return the settings with the upstreams read again if SIGHUP came; they stay if their file has a mistake."""
    if config.upstreams_file is None or signals.reloads.empty():
        return config
    signals.reloads.get_nowait()
    try:
        listed = read_upstreams(config.upstreams_file)
        return replace(config, upstreams=listed.origins, draining=listed.draining, stopped=listed.stopped)
    except InputError as error:
        say(f"SIGHUP: {error}; THE UPSTREAMS STAY AS THEY WERE")
        return config
