"""``python -m tap.admin FD``: the admin process, which serves health, metrics and a live page of what it is told."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address
from typing import Final, NamedTuple

import msgspec

from measure.exposition import MEDIA_TYPE, exposition
from tap.admin.metrics import tap_metrics
from tap.admin.state import LiveState, probe_upstreams
from tap.admin.view import snapshot
from tap.ipc.answer import Answer
from tap.ipc.messages import AdminSetup, Channel, Ready, TapStats
from wire.head import Header
from wire.loop import run
from wire.process import parent_socket
from wire.requesthead import RequestHead
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
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Cache-Control", b"no-store"),
)
PRIVATE_DOMAINS: Final = (".localhost", ".svc", ".cluster.local", ".internal")


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
        assets = {name: (files("tap.admin") / name).read_bytes() for name in ("page.html", "page.css", "page.js")}
        self._makers: Mapping[bytes, Callable[[], Page]] = {
            b"/healthz": lambda: Page(OK, JSON, b'{"status":"ok"}'),
            b"/readyz": self._readiness,
            b"/metrics": lambda: Page(OK, MEDIA_TYPE.encode(), exposition(tap_metrics(state))),
            b"/live.json": lambda: Page(OK, JSON, msgspec.json.encode(snapshot(state))),
            b"/": lambda: Page(OK, b"text/html; charset=utf-8", assets["page.html"]),
            b"/page.css": lambda: Page(OK, b"text/css", assets["page.css"]),
            b"/page.js": lambda: Page(OK, b"text/javascript", assets["page.js"]),
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
        # Probes tell nothing, and may come by any name.
        reason = None if path in (b"/healthz", b"/readyz") else refusal(head, self._state.setup.names)
        if reason is not None:
            return Page(b"403 Forbidden", b"text/plain", f"{reason}\n".encode())
        made_s, page = self._made.get(path, (float("-inf"), Page(b"", b"", b"")))
        now_s = self._clock()
        if now_s - made_s >= SHARED_S or path == b"/readyz":
            page = maker()
            self._made[path] = now_s, page
        return page

    def _readiness(self) -> Page:
        reasons = self._state.reasons_against()
        facts = {"ready": not reasons, "reasons": reasons, "not_recording": self._state.reasons_not_recording()}
        return Page(b"503 Service Unavailable" if reasons else OK, JSON, msgspec.json.encode(facts))


def refusal(head: RequestHead, names: Collection[str]) -> str | None:
    """Return the reason against a request, by its Host and Origin; null: none. ``names``: hosts that are ours.

    A page of a stranger can point its own name at this address (DNS rebinding) and then read what it finds. It cannot
    own an address, nor a name that public DNS does not have.
    """
    host = b"".join(head.values(b"host")).decode("latin-1").lower()
    if host and not _is_ours(_host_name(host), names):
        return "Host: unknown name; expected an IP address, localhost, or a name of admin-name in the --config file"
    for origin in head.values(b"origin"):
        if origin.partition(b"://")[2].decode("latin-1").lower() != host:
            return "Origin: another site; expected requests of these pages themselves"
    return None


def _host_name(host: str) -> str:
    """Return a Host header's name or address, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_ours(name: str, names: Collection[str]) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ip_address(name))
    return "." not in name or name in names or name.endswith(PRIVATE_DOMAINS)


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
