"""The HTTP face of the real-time engine: OpenAI's endpoints and vLLM's own, in one FastAPI application."""

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from sim import openai
from sim.exposition import Exposition
from sim.openai import ApiError
from sim.reply import CHAT, COMPLETION, JSON, GenerationEndpoint
from sim.service import Service


def make_app(service: Service) -> FastAPI:
    """The application over one running engine."""
    app = FastAPI(title="kvtape sim serve", version=service.version, openapi_url=None)
    exposition = Exposition(service.engine, service.model_name)
    app.router.add_route("/v1/completions", GenerationEndpoint(service, COMPLETION), methods=["POST"])  # type: ignore[arg-type]
    app.router.add_route("/v1/chat/completions", GenerationEndpoint(service, CHAT), methods=["POST"])  # type: ignore[arg-type]
    app.exception_handler(ApiError)(_answer_api_error)
    app.exception_handler(HTTPException)(_answer_http_error)
    _add_control_endpoints(app, service, exposition)
    _add_token_endpoints(app, service)
    return app


def _add_control_endpoints(app: FastAPI, service: Service, exposition: Exposition) -> None:
    started_s = int(time.time())

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
        return _json({"success": service.engine.reset_prefix_cache()})


def _add_token_endpoints(app: FastAPI, service: Service) -> None:
    vocabulary = service.vocabulary

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = openai.decode_body(await request.body(), openai.TokenizeRequest)
        service.check_model(body.model)
        if body.messages is not None:
            answer = body.add_generation_prompt is not False
            messages = [message.joined() for message in body.messages]
            token_ids = vocabulary.render_chat(messages, body.tools or [], answer=answer)
        elif body.prompt is not None:
            token_ids = vocabulary.encode(body.prompt)
        else:
            raise ApiError("expected a prompt or messages")
        strings = [vocabulary.decode([token_id]) for token_id in token_ids] if body.return_token_strs else None
        counted = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return _json(counted | {"tokens": token_ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = openai.decode_body(await request.body(), openai.DetokenizeRequest)
        service.check_model(body.model)
        openai.check_ids(body.tokens, vocabulary.size, "tokens")
        return _json({"prompt": vocabulary.decode(body.tokens)})


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
