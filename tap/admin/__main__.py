"""``python -m tap.admin FD``: the admin process, which serves health, metrics and a live page of what it is told."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

from measure.exposition import MEDIA_TYPE, exposition
from tap.admin.metrics import tap_metrics
from tap.admin.state import LiveState, probe_upstreams
from tap.admin.view import live_page
from tap.ipc.answer import Answer
from tap.ipc.messages import AdminSetup, Channel, Ready, TapStats
from wire.head import Header, RequestHead
from wire.loop import run
from wire.process import parent_socket
from wire.server import ClientConnection, Server

NICENESS: Final = 15
"""Priority below the relay and the recorder."""
LEAVE_S: Final = 1.0
SHARED_S: Final = 1.0
"""Time for which all readers get the same page."""
JSON: Final = b"application/json"
OK: Final = b"200 OK"
HEADERS: Final[Sequence[Header]] = (
    (
        b"Content-Security-Policy",
        b"default-src 'none'; style-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Cache-Control", b"no-store"),
)


class Page(NamedTuple):
    """An answer without its common headers."""

    status: bytes
    kind: bytes
    body: bytes


class Pages:
    """Pages of the admin port, each made at most once a second."""

    def __init__(self, state: LiveState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._made: dict[bytes, tuple[float, Page]] = {}
        style = (files("tap.admin") / "page.css").read_bytes()
        self._makers: Mapping[bytes, Callable[[], Page]] = {
            b"/healthz": lambda: Page(OK, JSON, b'{"status":"ok"}'),
            b"/readyz": self._readiness,
            b"/metrics": lambda: Page(OK, MEDIA_TYPE.encode(), exposition(tap_metrics(state))),
            b"/": lambda: Page(OK, b"text/html; charset=utf-8", live_page(state)),
            b"/page.css": lambda: Page(OK, b"text/css", style),
        }

    def answer(self, head: RequestHead, client: ClientConnection) -> Answer:
        status, kind, body = self.page(head)
        return Answer(head, client, status, [(b"Content-Type", kind), *HEADERS], body)

    def page(self, head: RequestHead) -> Page:
        path = head.target.partition(b"?")[0]
        maker = self._makers.get(path)
        if maker is None:
            return Page(b"404 Not Found", b"text/plain", b"no such page\n")
        if head.method not in (b"GET", b"HEAD"):
            return Page(b"405 Method Not Allowed", b"text/plain", b"expected GET\n")
        if head.values(b"origin"):  # no page has a script that asks: it is another site's
            return Page(b"403 Forbidden", b"text/plain", b"Origin: another site; expected none\n")
        now_s = self._clock()
        made_s, page = self._made.get(path, (float("-inf"), None))
        if page is None or now_s - made_s >= SHARED_S or path == b"/readyz":
            page = maker()
            self._made[path] = now_s, page
        return page

    def _readiness(self) -> Page:
        reasons = self._state.reasons_against()
        facts = {"ready": not reasons, "reasons": reasons, "not_recording": self._state.reasons_not_recording()}
        return Page(b"503 Service Unavailable" if reasons else OK, JSON, msgspec.json.encode(facts))


_messages: Final = msgspec.msgpack.Decoder(AdminSetup | TapStats)


async def serve_pages(control: socket.socket) -> None:
    channel = await Channel(_messages).attach(control)
    setup = await channel.messages.get()
    if not isinstance(setup, AdminSetup):
        return
    state = LiveState(setup)
    server = Server(Pages(state).answer)
    await server.listen_on(socket.socket(fileno=setup.listen_fd))
    probing = asyncio.create_task(probe_upstreams(state))
    channel.post(Ready())
    while (message := await channel.messages.get()) is not None:
        state.take(message, time.monotonic())
    probing.cancel()
    await server.drain(LEAVE_S)


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        run(serve_pages(sock))
    except Exception as error:  # one line instead of a traceback; the supervisor restarts the process
        print(f"tap: the admin process failed ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
