"""Pages besides the generation endpoints: vLLM's control pages and metrics."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from prometheus_client.core import Metric

from engines.vllm import EMBEDDED_NAME
from measure.exposition import MEDIA_TYPE, Families, exposition
from sim.serving.exchange import JSON_TYPE, Exchange, HttpRequest
from sim.serving.fields import ApiError, DetokenizeRequest, TokenizeRequest, check_ids, decode_body
from sim.serving.realtime import LATENESS_S, RealTimeEngine
from sim.serving.service import Service

Page = Callable[[Service, bytes], Any]
"""Returns the response to a body: bytes of text, or a value for JSON. Raises ApiError."""


def respond(service: Service, request: HttpRequest, exchange: Exchange) -> None:
    is_head, method = request.head.method == b"HEAD", request.head.method.decode("latin-1").replace("HEAD", "GET")
    try:
        if request.path not in PAGES:
            raise ApiError("Not Found", status=404, kind="NotFoundError")
        allowed, page = PAGES[request.path]
        if method != allowed:
            raise ApiError("Method Not Allowed", status=405)
        body = page(service, request.body)
    except ApiError as error:
        exchange.respond(error.status, (JSON_TYPE,), error.body())
        return
    is_text = isinstance(body, bytes)
    content_type = (b"content-type", MEDIA_TYPE.encode()) if is_text else JSON_TYPE
    exchange.respond(200, (content_type,), body if is_text else msgspec.json.encode(body), is_head=is_head)


def _models(service: Service, _: bytes) -> Any:
    card = {"id": service.model_name, "object": "model", "created": int(time.time()), "owned_by": "kvtape"}
    card |= {"root": service.model_name, "parent": None, "max_model_len": service.max_model_len}
    return {"object": "list", "data": [card]}


def _tokenize(service: Service, body: bytes) -> Any:
    request, vocabulary = decode_body(body, TokenizeRequest), service.vocabulary
    service.check_model(request.model)
    if request.messages is not None:
        generation_prompt = request.add_generation_prompt is not False
        joined = [message.joined() for message in request.messages]
        token_ids = vocabulary.render_chat(joined, generation_prompt=generation_prompt)
    elif request.prompt is not None:
        token_ids = vocabulary.encode(request.prompt)
    else:
        raise ApiError("expected a prompt or messages")
    strings = [vocabulary.decode([token_id]) for token_id in token_ids] if request.return_token_strs else None
    counted = {"count": len(token_ids), "max_model_len": service.max_model_len}
    return counted | {"tokens": token_ids, "token_strs": strings}


def _detokenize(service: Service, body: bytes) -> Any:
    request = decode_body(body, DetokenizeRequest)
    service.check_model(request.model)
    check_ids(request.tokens, service.vocabulary.size, "tokens")
    return {"prompt": service.vocabulary.decode(request.tokens)}


PAGES: dict[str, tuple[str, Page]] = {
    "/health": ("GET", lambda _, __: b""),
    "/version": ("GET", lambda service, _: {"version": service.version, "engine": EMBEDDED_NAME}),
    "/v1/models": ("GET", _models),
    "/metrics": ("GET", lambda service, _: exposition(engine_metrics(service.fleet.engines, service.model_name))),
    "/reset_prefix_cache": ("POST", lambda service, _: {"success": service.fleet.reset_prefix_cache()}),
    "/tokenize": ("POST", _tokenize),
    "/detokenize": ("POST", _detokenize),
}
"""Method and page by path."""
_VLLM = Families("vllm:")
_LABELS = ("model_name", "engine")
_Read = Callable[[RealTimeEngine], Any]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda engine: engine.num_running),
    ("num_requests_waiting", "Requests waiting to be scheduled.", lambda engine: engine.num_waiting),
    ("kv_cache_usage_perc", "KV cache usage; 1 is 100 %.", lambda engine: engine.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda engine: engine.scheduler.stats.query_tokens,
    ),
    ("prefix_cache_hits", "Tokens hit in the prefix cache.", lambda engine: engine.scheduler.stats.hit_tokens),
    (
        "prompt_tokens",
        "Prompt tokens of requests with a first token.",
        lambda engine: engine.counters.prompt_tokens,
    ),
    (
        "prompt_tokens_cached",
        "Prompt tokens from the prefix cache.",
        lambda engine: engine.counters.cached_prompt_tokens,
    ),
    ("generation_tokens", "Tokens generated.", lambda engine: engine.counters.generation_tokens),
    ("num_preemptions", "Preemptions of requests.", lambda engine: engine.counters.preemptions),
)


def engine_metrics(engines: Sequence[RealTimeEngine], model_name: str) -> Iterator[Metric]:
    """Yield scheduler, KV cache and prefix cache metrics, named as in vLLM 0.32."""
    labelled = [((model_name, str(index)), engine) for index, engine in enumerate(engines)]
    for engine in engines:
        engine.flush()
    yield _cache_config(engines)
    for name, text, read in _GAUGES:
        yield _VLLM.gauge(name, text, [(labels, read(engine)) for labels, engine in labelled], _LABELS)
    for name, text, read in _COUNTERS:
        yield _VLLM.counter(name, text, [(labels, read(engine)) for labels, engine in labelled], _LABELS)
    ended = [
        ((*labels, reason), count) for labels, engine in labelled for reason, count in engine.counters.finished.items()
    ]
    yield _VLLM.counter("request_success", "Finished requests.", ended, [*_LABELS, "finished_reason"])
    late = [(labels, engine.counters.lateness_s) for labels, engine in labelled]
    text = "Delay of a step's first token against the model's time."
    yield Families("kvtape_sim:").histogram("lateness_seconds", text, LATENESS_S, late, _LABELS)


def _cache_config(engines: Sequence[RealTimeEngine]) -> Metric:
    names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
    rows = [
        ([*(str(getattr(engine.config, name)) for name in names), str(index)], 1.0)
        for index, engine in enumerate(engines)
    ]
    return _VLLM.gauge("cache_config_info", "Settings of the KV cache.", rows, [*names, "engine"])
