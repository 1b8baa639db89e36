"""Control pages: a FastAPI application behind ``wire.server``, one whole request in, one whole response out."""

import asyncio
from typing import Any

from starlette.types import ASGIApp

from sim.serving.exchange import Exchange, HttpRequest


class AsgiPages:
    """Handler that passes requests to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    def __call__(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer ``request`` in a task of its own."""
        task = asyncio.create_task(self._answer(request, exchange))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, request: HttpRequest, exchange: Exchange) -> None:
        status, headers, parts = 500, [], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [header for header in message.get("headers", ()) if header[0] != b"content-length"]
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(_scope(request), receive, send)
        finally:
            exchange.whole(status, headers, b"".join(parts), is_head=request.head.method == b"HEAD")


def _scope(request: HttpRequest) -> dict[str, Any]:
    head = request.head
    path, _, query = head.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": head.version,
        "method": head.method.decode("latin-1"),
        "scheme": "http",
        "path": path.decode("latin-1"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name, value) for name, (_, value) in zip(head.names, head.headers, strict=True)],
        "client": None,
        "server": None,
    }
