"""Untimed endpoints: vLLM's control pages, in one FastAPI application behind ``wire.server``."""

import asyncio
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from sim.serving.apis import messages
from sim.serving.engine.faults import parse_faults
from sim.serving.engine.service import Service
from sim.serving.exchange import Exchange, HttpRequest
from sim.serving.exposition import Exposition
from sim.serving.requests import fields as requests
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import check_ids, decode_body
from tracefile.records.errors import InputError

JSON = "application/json"


class FaultsRequest(msgspec.Struct, frozen=True):
    """Body of ``PUT /faults``: faults as ``--fault`` takes them."""

    faults: list[str]


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="kvtape sim serve", version=service.version, openapi_url=None)
    app.exception_handler(ApiError)(_answer_api_error)
    app.exception_handler(HTTPException)(_answer_http_error)
    _add_control_endpoints(app, service)
    _add_token_endpoints(app, service)
    if service.faults.by_request:
        _add_fault_endpoints(app, service)
    return app


def _add_control_endpoints(app: FastAPI, service: Service) -> None:
    started_s = int(time.time())
    exposition = Exposition(service.fleet.engines, service.model_name, service.faults)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": service.version, "engine": "kvtape sim"})

    @app.get("/v1/models")
    async def models() -> Response:
        card = {
            "id": service.model_name,
            "object": "model",
            "created": started_s,
            "owned_by": "kvtape",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return _json({"success": service.fleet.reset_prefix_cache()})


def _add_token_endpoints(app: FastAPI, service: Service) -> None:
    vocabulary = service.vocabulary

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = decode_body(await request.body(), requests.TokenizeRequest)
        service.check_model(body.model)
        if body.messages is not None:
            answer = body.add_generation_prompt is not False
            joined = [message.joined() for message in body.messages]
            token_ids = vocabulary.render_chat(joined, body.tools or [], answer=answer)
        elif body.prompt is not None:
            token_ids = vocabulary.encode(body.prompt)
        else:
            raise ApiError("expected a prompt or messages")
        strings = [vocabulary.decode([token_id]) for token_id in token_ids] if body.return_token_strs else None
        counted = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return _json(counted | {"tokens": token_ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = decode_body(await request.body(), requests.DetokenizeRequest)
        service.check_model(body.model)
        check_ids(body.tokens, vocabulary.size, "tokens")
        return _json({"prompt": vocabulary.decode(body.tokens)})

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        try:
            body = decode_body(await request.body(), messages.CountRequest)
            service.check_model(body.model)
            return _json({"input_tokens": len(messages.render(service, body))})
        except ApiError as error:
            return Response(error.messages_body(), status_code=error.status, media_type=JSON)


def _add_fault_endpoints(app: FastAPI, service: Service) -> None:
    @app.get("/faults")
    async def faults() -> Response:
        return _json({"faults": [fault.text for fault in service.faults.rules], "injected": service.faults.injected})

    @app.put("/faults")
    async def set_faults(request: Request) -> Response:
        body = decode_body(await request.body(), FaultsRequest)
        try:
            service.faults.rules = parse_faults(body.faults, "faults")
        except InputError as error:
            raise ApiError(str(error), param="faults") from None
        return await faults()


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), status_code=error.status, media_type=JSON)


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    shaped = ApiError(str(error.detail), status=error.status_code, kind=kind)
    return Response(shaped.body(), status_code=error.status_code, media_type=JSON, headers=error.headers)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


class AsgiPages:
    """Handler that passes requests to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    def __call__(self, request: HttpRequest, exchange: Exchange) -> None:
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
