"""Untimed endpoints: vLLM's control pages and metrics, in one FastAPI application behind ``wire.server``."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from engines.vllm import EMBEDDED_NAME
from measure.exposition import MEDIA_TYPE, Families, exposition
from measure.histogram import HistogramCounts
from sim.serving.engine.faults import Faults, parse_faults
from sim.serving.engine.realtime import LATENESS_S, SECONDS, RealTimeEngine
from sim.serving.engine.service import Service
from sim.serving.exchange import Exchange, HttpRequest
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
    app.exception_handler(ApiError)(_api_error_response)
    app.exception_handler(HTTPException)(_http_error_response)
    _add_control_endpoints(app, service)
    _add_token_endpoints(app, service)
    if service.faults.by_request:
        _add_fault_endpoints(app, service)
    return app


def _add_control_endpoints(app: FastAPI, service: Service) -> None:
    started_s = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": service.version, "engine": EMBEDDED_NAME})

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": started_s,
                "owned_by": "kvtape",
                "root": name,
                "parent": None if name == service.model_name else service.model_name,
                "max_model_len": service.max_model_len,
            }
            for name in (service.model_name, *service.fleet.adapters.names)
        ]
        return _json({"object": "list", "data": cards})

    @app.get("/metrics")
    async def metrics() -> Response:
        found = engine_metrics(service.fleet.engines, service.model_name, service.faults)
        return Response(exposition(found), media_type=MEDIA_TYPE)

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
            generation_prompt = body.add_generation_prompt is not False
            joined = [message.joined() for message in body.messages]
            token_ids = vocabulary.render_chat(joined, body.tools or [], generation_prompt=generation_prompt)
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


async def _api_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), status_code=error.status, media_type=JSON)


async def _http_error_response(_: Request, error: Exception) -> Response:
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
        task = asyncio.create_task(self._respond(request, exchange))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
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


_VLLM = Families("vllm:")
_OWN = Families("kvtape_sim:")
_LABELS = ("model_name", "engine")
_Read = Callable[[RealTimeEngine], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Requests that hold blocks.", lambda engine: engine.num_running),
    ("num_requests_waiting", "Requests that wait to be scheduled.", lambda engine: engine.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", lambda engine: engine.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda engine: engine.scheduler.stats.query_tokens,
    ),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda engine: engine.scheduler.stats.hit_tokens),
    (
        "prompt_tokens",
        "Prompt tokens of requests that got a first token.",
        lambda engine: engine.counters.prompt_tokens,
    ),
    ("prompt_tokens_cached", "Those from the prefix cache.", lambda engine: engine.counters.cached_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda engine: engine.counters.generation_tokens),
    ("num_preemptions", "Requests that had to give their blocks back.", lambda engine: engine.counters.preemptions),
)
_HISTOGRAMS: tuple[tuple[Families, str, str, Sequence[float], Callable[[RealTimeEngine], HistogramCounts]], ...] = (
    (_VLLM, "time_to_first_token_seconds", "Time to first token.", SECONDS, lambda engine: engine.counters.ttft_s),
    (
        _VLLM,
        "inter_token_latency_seconds",
        "Gap between a request's tokens.",
        SECONDS,
        lambda engine: engine.counters.itl_s,
    ),
    (_VLLM, "e2e_request_latency_seconds", "Arrival to last token.", SECONDS, lambda engine: engine.counters.e2e_s),
    (
        _OWN,
        "lateness_seconds",
        "Delay of a step's first token against the model's time.",
        LATENESS_S,
        lambda engine: engine.counters.lateness_s,
    ),
)


def engine_metrics(engines: Sequence[RealTimeEngine], model_name: str, faults: Faults) -> Iterator[Metric]:
    """Yield the engines' metrics, vLLM 0.32's and our own."""
    placed = [((model_name, str(place)), engine) for place, engine in enumerate(engines)]
    for engine in engines:
        engine.settle()
    yield _cache_config(engines)
    for name, text, read in _GAUGES:
        yield _VLLM.gauge(name, text, [(labels, read(engine)) for labels, engine in placed], _LABELS)
    for name, text, read in _COUNTERS:
        yield _VLLM.counter(name, text, [(labels, read(engine)) for labels, engine in placed], _LABELS)
    ended = [
        ((*labels, reason), count) for labels, engine in placed for reason, count in engine.counters.finished.items()
    ]
    yield _VLLM.counter("request_success", "Requests that ended.", ended, [*_LABELS, "finished_reason"])
    for family, name, text, bounds, counts_of in _HISTOGRAMS:
        counts = [(labels, counts_of(engine)) for labels, engine in placed]
        yield family.histogram(name, text, bounds, counts, _LABELS)
    injected = [((kind,), count) for kind, count in faults.injected.items()]
    yield _OWN.counter("faults", "Faults injected on purpose.", injected, ["kind"])


def _cache_config(engines: Sequence[RealTimeEngine]) -> Metric:
    names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
    rows = [
        ([*(str(getattr(engine.scheduler.config, name)) for name in names), str(place)], 1.0)
        for place, engine in enumerate(engines)
    ]
    return _VLLM.gauge("cache_config_info", "Settings of the KV cache.", rows, [*names, "engine"])
