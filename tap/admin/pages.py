"""Pages of the admin port: health, readiness, metrics."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from measure.exposition import MEDIA_TYPE, exposition
from tap.admin.metrics import tap_metrics
from tap.admin.state import TapStats
from tap.ipc.answer import Answer
from wire.head import Header, RequestHead
from wire.server import ClientConnection, Server

LEAVE_S: Final = 1.0
JSON: Final = b"application/json"
OK: Final = b"200 OK"
HEADERS: Final[Sequence[Header]] = (
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Cache-Control", b"no-store"),
)


class Page(NamedTuple):
    """Response without the common headers."""

    status: bytes
    kind: bytes
    body: bytes


@contextlib.asynccontextmanager
async def serving_pages(listener: socket.socket, stats: Callable[[], TapStats]) -> AsyncIterator[None]:
    """Serve the pages on a bound socket; each request reads the current ``stats``."""

    def answer(head: RequestHead, client: ClientConnection) -> Answer:
        status, kind, body = page_of(head, stats)
        return Answer(head, client, status, [(b"Content-Type", kind), *HEADERS], body)

    server = Server(answer)
    await server.listen_on(listener)
    try:
        yield
    finally:
        await server.drain(LEAVE_S)


def page_of(head: RequestHead, stats: Callable[[], TapStats]) -> Page:
    path = head.target.partition(b"?")[0]
    if path not in (b"/healthz", b"/readyz", b"/metrics"):
        return Page(b"404 Not Found", b"text/plain", b"unknown page; expected /healthz, /readyz or /metrics\n")
    if head.method not in (b"GET", b"HEAD"):
        return Page(b"405 Method Not Allowed", b"text/plain", b"expected GET\n")
    if head.values(b"origin"):  # admin pages have no scripts: the request comes from another site
        return Page(b"403 Forbidden", b"text/plain", b"cross-origin request; expected no Origin header\n")
    if path == b"/metrics":
        return Page(OK, MEDIA_TYPE.encode(), exposition(tap_metrics(stats())))
    return _readiness(stats()) if path == b"/readyz" else Page(OK, JSON, b'{"status":"ok"}')


def _readiness(stats: TapStats) -> Page:
    reasons = stats.not_ready_reasons()
    facts = {"ready": not reasons, "reasons": reasons, "not_recording": stats.not_recording_reasons()}
    return Page(b"503 Service Unavailable" if reasons else OK, JSON, msgspec.json.encode(facts))
