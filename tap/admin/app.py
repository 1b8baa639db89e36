"""The admin port's pages: health for orchestrators, metrics for Prometheus, a live page.

Expensive pages are made at most once a second and shared by all readers, so frequent requests cost no more.
"""

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from tap.admin.exposition import Exposition
from tap.admin.health import reasons_against, reasons_not_recording
from tap.admin.snapshot import Snapshot
from tap.admin.state import LiveState
from tap.admin.survival import MIN_JUDGED
from tap.admin.view import snapshot

SHARED_S: Final = 1.0
JSON_TYPE: Final = "application/json"
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Clock = Callable[[], float]
T = TypeVar("T")


def make_app(state: LiveState, clock: Clock = time.monotonic) -> FastAPI:
    """Return the application over a state, which other tasks keep up to date."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    latest = shared(lambda: snapshot(state, clock()), clock)
    live = shared(lambda: msgspec.json.encode(latest()), clock)
    exposition = Exposition(state)
    metrics = shared(lambda: exposition.text(clock()), clock)
    template = _page_template()
    page = shared(lambda: _page(template, latest()), clock)

    @app.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        reasons = reasons_against(state)
        facts = {"ready": not reasons, "reasons": reasons, "not_recording": reasons_not_recording(state, clock())}
        return _json(facts, 503 if reasons else 200)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return _answer(metrics(), METRICS_TYPE)

    @app.get("/live.json")
    async def live_json() -> Response:
        return _answer(live(), JSON_TYPE)

    @app.get("/")
    async def index() -> Response:
        return _answer(page(), "text/html")

    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        app.add_route(f"/{name}", _asset_route(_asset(name).encode(), kind), include_in_schema=False)
    return app


def shared(make: Callable[[], T], clock: Clock) -> Callable[[], T]:
    """Return ``make``, called at most once every ``SHARED_S``."""
    made: list[tuple[float, T]] = []

    def latest() -> T:
        if not made or clock() - made[0][0] >= SHARED_S:
            made[:] = [(clock(), make())]
        return made[0][1]

    return latest


def _asset_route(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def asset(request: Request) -> Response:
        return _answer(content, kind)

    return asset


def _json(value: object, status: int = 200) -> Response:
    return _answer(msgspec.json.encode(value), JSON_TYPE, status)


def _answer(content: bytes, kind: str, status: int = 200) -> Response:
    return Response(content, status, HEADERS, kind)


def _page(template: Template, live: Snapshot) -> bytes:
    """Return the page with its first snapshot, escaped so that no text can end the script tag."""
    first = msgspec.json.encode(live).decode().replace("<", "\\u003c")
    return template.render(live=live, first=Markup(first), least=MIN_JUDGED).encode()


def _page_template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.jinja"))


def _asset(name: str) -> str:
    return (files("tap.admin") / name).read_text(encoding="utf-8")
